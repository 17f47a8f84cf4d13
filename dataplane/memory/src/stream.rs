//! Copies into memory that is not read again soon.
#![allow(unsafe_code)]

use super::shared::Shared;

/// What is summed up and copied in turns: so little that the processor still writes one piece out while it sums up the next. In pieces of
/// 4 or 8 KiB, 1 MiB takes a seventh longer.
pub(super) const STEP: usize = 1 << 10;

/// Has the processor fetch the next [`STEP`] but one of `rest`, of which the first is about to be copied. Its own guesses end with each page:
/// without, 1 MiB that is in no cache takes a third longer.
pub(super) fn fetch_ahead(rest: Shared<'_>) {
    // Miri does not support it, and nothing changes but the time.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let piece = rest.after(2 * STEP).first(STEP);
        for at in (0..piece.len()).step_by(64) {
            // SAFETY: the address lies in memory that can be read; SSE is part of every x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(piece.as_ptr().add(at).cast()) };
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = rest;
}

/// Copies `from` to `to` without first reading the target's lines into the cache, if the processor can: a block
/// that is stored is larger than the caches, and reading what is overwritten costs a third of the memory's bandwidth.
///
/// # Safety
/// `to` is valid for writes of `from.len()` bytes and does not overlap `from`.
pub(super) unsafe fn copy_past_cache(from: Shared<'_>, to: *mut u8) {
    // SAFETY: passed on to the caller.
    unsafe {
        // Miri does not support such stores.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        let done = copy_lines(from, to);
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let done = 0;
        std::ptr::copy_nonoverlapping(from.as_ptr().add(done), to.add(done), from.len() - done);
    }
}

/// Orders the copies before everything that this thread stores from here on.
pub(super) fn settle() {
    // SAFETY: a fence has no conditions; SSE2 is part of every x86-64.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Copies whole cache lines and returns how many bytes those were: 0 if `to` is not aligned.
///
/// # Safety
/// As for [`copy_past_cache`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_lines(from: Shared<'_>, to: *mut u8) -> usize {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    if !to.cast::<__m128i>().is_aligned() {
        return 0;
    }
    let lines = from.len() / 64;
    for n in 0..lines {
        // SAFETY: 64 readable bytes at `source`; as many writable and aligned ones at this place of `to`; SSE2 is part
        // of every x86-64.
        unsafe {
            let source = from.as_ptr().add(n * 64).cast::<__m128i>();
            let target = to.add(n * 64).cast::<__m128i>();
            let values = [0, 1, 2, 3].map(|i| _mm_loadu_si128(source.add(i)));
            for (i, value) in values.into_iter().enumerate() {
                _mm_stream_si128(target.add(i), value);
            }
        }
    }
    lines * 64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_whole() {
        let from: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        for (len, shift) in [(0, 0), (1, 0), (63, 0), (64, 0), (65, 16), (640, 0), (641, 1), (900, 8)] {
            let mut to = vec![0u8; 1024];
            let start = to.as_ptr().align_offset(64) + shift;
            // SAFETY: `start` is at most 63 + 16, so that `len` bytes from there on lie inside.
            unsafe { copy_past_cache(Shared::from(&from[..len]), to.as_mut_ptr().add(start)) };
            assert_eq!(to[start..start + len], from[..len], "{len} at {shift}");
            assert!(to[start + len..].iter().all(|&byte| byte == 0), "{len} at {shift}");
        }
    }
}
