//! Memory that holds blocks: where it comes from ([`host`]), how its pages lie ([`placing`]), who has which part of it ([`extents`]), what is lent
//! to one operation ([`buffer`]), what transfers may name ([`region`]), and the memory of GPUs ([`cuda`]).

pub mod buffer;
pub mod cuda;
pub mod extents;
pub mod host;
pub mod placing;
pub mod region;
mod stream;
