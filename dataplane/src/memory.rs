//! Memory that holds blocks: where it comes from ([`host`]), who has which part of it ([`extents`]), and what is lent
//! to one operation ([`buffer`]).

pub mod buffer;
pub mod extents;
pub mod host;
