//! Memory that holds blocks: where it comes from ([`host`]) and who has which part of it ([`extents`]).

pub mod extents;
pub mod host;
