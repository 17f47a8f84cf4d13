//! What the driver's functions return, and how arguments come in and results go out.

use std::ffi::{CStr, c_char};

/// An error by the number and the name that `cuda.h` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaError(pub(crate) u32);

pub(crate) type Outcome<T> = Result<T, CudaError>;

macro_rules! errors {
    ($($name:ident = $number:literal: $text:literal,)*) => {
        impl CudaError {
            $(pub(crate) const $name: Self = Self($number);)*

            /// Name and meaning.
            pub(crate) fn texts(number: u32) -> Option<(&'static CStr, &'static CStr)> {
                match number {
                    0 => Some((c"CUDA_SUCCESS", c"no error")),
                    $($number => {
                        let name = concat!("CUDA_ERROR_", stringify!($name), "\0");
                        let text = concat!($text, " (software device)\0");
                        Some((CStr::from_bytes_until_nul(name.as_bytes()).ok()?,
                              CStr::from_bytes_until_nul(text.as_bytes()).ok()?))
                    })*
                    _ => None,
                }
            }
        }
    };
}

errors! {
    INVALID_VALUE = 1: "invalid argument",
    OUT_OF_MEMORY = 2: "out of memory",
    NOT_INITIALIZED = 3: "initialization error",
    INVALID_DEVICE = 101: "invalid device ordinal",
    INVALID_IMAGE = 200: "device kernel image is invalid",
    INVALID_CONTEXT = 201: "invalid device context",
    INVALID_HANDLE = 400: "invalid resource handle",
    NOT_FOUND = 500: "named symbol not found",
    NOT_READY = 600: "device not ready",
    ILLEGAL_ADDRESS = 700: "an illegal memory access was encountered",
    HOST_MEMORY_ALREADY_REGISTERED = 712: "part or all of the requested memory range is already mapped",
    HOST_MEMORY_NOT_REGISTERED = 713: "pointer does not correspond to a registered memory region",
    NOT_SUPPORTED = 801: "operation not supported",
    UNKNOWN = 999: "unknown error",
}

/// Runs a function of the driver, unless an error was ordered for it.
pub(crate) fn call(function: &'static str, run: impl FnOnce() -> Outcome<()>) -> u32 {
    let outcome = crate::fault::of(function).and_then(|()| run());
    outcome.map_or_else(|error| error.0, |()| 0)
}

/// Where a result goes.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A null pointer is refused, as by the driver.
    pub(crate) fn set(&self, value: T) -> Outcome<()> {
        if self.0.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: not null, and by the contract of the C function that it was given to, room for one `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn to(place: &mut T) -> Self {
        Self(place)
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes several, one after the other.
    pub(crate) fn set_all(&self, values: &[T]) -> Outcome<()>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: not null, and by the contract of the C function that it was given to, room for as many.
        unsafe { self.0.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }
}

/// A structure or list that is read before the call returns.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Outcome<T> {
        self.list(1).map(|list| list[0])
    }

    pub(crate) fn list(&self, count: usize) -> Outcome<Vec<T>> {
        if self.0.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: not null, and by the contract of the C function that it was given to, as many values.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }
}

/// A text of C.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    #[cfg(test)]
    pub(crate) fn of(text: &CStr) -> Self {
        Self(text.as_ptr())
    }

    pub(crate) fn get(&self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: not null, and by the contract of the C function that it was given to, ended by a zero.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}
