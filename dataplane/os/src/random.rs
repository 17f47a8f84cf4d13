//! Chance.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Fills it with bytes that nobody can guess.
///
/// # Panics
/// If the system has none: without them keys could be guessed, and going on would be worse than stopping.
pub fn fill(bytes: &mut [u8]) {
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("the system gives no random bytes: {error}"),
        }
    }
}

/// Differs from run to run, and is no secret.
pub fn number() -> u64 {
    RandomState::new().build_hasher().finish()
}
