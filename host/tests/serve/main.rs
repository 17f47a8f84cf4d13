//! A whole host: in this process over its services, and as the real binary over its commands.

mod access;
mod anything;
mod authors;
mod bad_policies;
mod cli;
mod client_tls;
mod compare;
mod crash;
mod dev;
mod doctor;
mod doors;
mod explain;
mod grpc;
mod handover;
mod harm;
mod inputs;
mod learning;
mod metrics;
mod process;
mod registry;
mod replicas;
mod rollout;
mod rpc;
mod tiers;
mod tls;
mod trust;
