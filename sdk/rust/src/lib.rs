//! Write a Kvasir policy in Rust.
//!
//! Implement one trait ([`Scheduler`], [`Evictor`], [`Admitter`] or [`Balancer`]) for a type with a
//! `Default`, and name it in the matching `export_…!` macro. The same crate then
//!
//! * compiles to a component (`cargo xtask policies`, target `wasm32-unknown-unknown`), and
//! * runs natively in the author's own unit tests, in `kvasir replay --engine native`, and, for the
//!   default policies, as the fallback behind the component.
//!
//! ```
//! use kvasir_policy::{Description, Scheduler, scheduler::*};
//!
//! /// Sends every request to the first free pair.
//! #[derive(Default)]
//! struct FirstFree;
//!
//! impl Scheduler for FirstFree {
//!     fn describe(&self) -> Description {
//!         Description::scheduler("first-free", "0.1.0")
//!     }
//!     fn schedule(&mut self, cluster: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
//!         let first = |available: &[f32]| available.iter().position(|&a| a == 1.0);
//!         match (first(&cluster.prefill.available), first(&cluster.decode.available)) {
//!             (Some(prefill), Some(decode)) => Decision::run(prefill as u32, decode as u32),
//!             _ => Decision::reject(Reason::NoInstance, 1_000),
//!         }
//!     }
//! }
//! kvasir_policy::export_scheduler!(FirstFree);
//! ```
//!
//! What each call means, when it comes and what happens when it fails is written once, in
//! `wit/policy-0.1/*.wit`. The same inputs must give the same answers in Wasm and natively, so take
//! transcendental functions from [`math`], not from `std`: the platform's own differ in the last bit.
#![deny(clippy::disallowed_methods)]

pub mod admitter;
pub mod balancer;
pub mod books;
pub mod columns;
mod description;
pub mod draw;
pub mod evictor;
mod export;
pub mod fit;
pub mod ghosts;
pub mod learning;
pub mod list;
pub mod log;
pub mod math;
pub mod octaves;
mod question;
mod request;
pub mod scheduler;
pub mod testing;

pub use admitter::Admitter;
pub use balancer::Balancer;
pub use description::{Description, Setting, SettingError, Settings};
pub use evictor::Evictor;
pub use learning::Learner;
pub use scheduler::Scheduler;

#[doc(hidden)]
#[cfg(target_arch = "wasm32")]
pub use export::bindings;
