//! Randomness.

/// A number that nobody outside can guess.
pub(crate) fn random() -> u64 {
    std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u64)
}
