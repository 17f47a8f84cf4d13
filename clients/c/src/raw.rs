//! Pointers that C gives. What can be seen of them is checked here; the rest is the caller's word.

use std::ffi::{CStr, c_char};

use crate::failure::Failure;

/// A list to read. Null is fine where it has nothing.
///
/// # Safety
/// If it passes the checks: `count` initialised values, which nobody writes while the result is used.
pub(crate) unsafe fn list<'a, T>(what: &str, from: *const T, count: usize) -> Result<&'a [T], Failure> {
    check(what, from, count)?;
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null, aligned, no longer than an object can be; the rest is the caller's word.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

/// A list to fill.
///
/// # Safety
/// As [`list`], and nobody else uses it meanwhile.
pub(crate) unsafe fn room<'a, T>(what: &str, to: *mut T, count: usize) -> Result<&'a mut [T], Failure> {
    check(what, to, count)?;
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as above.
    Ok(unsafe { std::slice::from_raw_parts_mut(to, count) })
}

/// Where a result goes.
///
/// # Safety
/// As [`room`], of one value, which need not be initialised.
pub(crate) unsafe fn set<T>(what: &str, to: *mut T, value: T) -> Result<(), Failure> {
    check(what, to, 1)?;
    // SAFETY: not null and aligned; the rest is the caller's word.
    unsafe { to.write(value) };
    Ok(())
}

/// A text; `None` for null.
///
/// # Safety
/// It ends with a zero, and nobody writes to it while the result is used.
pub(crate) unsafe fn text<'a>(what: &str, from: *const c_char) -> Result<Option<&'a str>, Failure> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; the rest is the caller's word.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map(Some).map_err(|_| Failure::invalid(format!("{what} is not UTF-8")))
}

/// Null, misaligned, or longer than the address space.
pub(crate) fn check<T>(what: &str, at: *const T, count: usize) -> Result<(), Failure> {
    if count > 0 && at.is_null() {
        return Err(Failure::invalid(format!("{what} is null")));
    }
    if !at.is_aligned() {
        return Err(Failure::invalid(format!("{what}, at {at:p}, is not aligned to {} B", align_of::<T>())));
    }
    let bytes = count.checked_mul(size_of::<T>()).and_then(|len| at.addr().checked_add(len));
    if bytes.is_none_or(|end| end > isize::MAX as usize) {
        return Err(Failure::invalid(format!("{what}: {count} of them end beyond the address space")));
    }
    Ok(())
}
