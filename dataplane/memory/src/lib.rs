//! Memory that holds blocks: where it comes from ([`host`]), how its pages lie ([`placing`]) and when they come ([`filling`]), who has which part
//! of it ([`extents`]), what is lent to one operation ([`buffer`]) and kept for the next ([`spares`]), what transfers may name ([`region`]), what
//! others may be changing meanwhile ([`shared`]), what lies in many places ([`runs`]), and how KV lies in it ([`layout`]).

pub mod buffer;
pub mod checksum;
pub mod device_handle;
pub mod extents;
pub mod filling;
pub mod host;
pub mod layout;
pub mod placing;
pub mod region;
pub mod runs;
pub mod shared;
pub mod spares;
mod stream;
