//! What a client and its host say to each other: what a block is called ([`block`]), frames ([`wire`]), and what carries them
//! ([`stream`]); also how a host accepts connections of any kind ([`listener`]). It knows no store, no peers and no devices.

pub mod block;
pub mod clock;
pub mod listener;
pub mod stream;
pub mod wire;
