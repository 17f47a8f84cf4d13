//! NVRTC, which turns the source of a kernel into an image that `cuModuleLoadData` takes.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};

use crate::kernel;
use crate::outcome::{Out, Text};

#[derive(Default)]
struct Program {
    source: String,
    image: String,
    log: String,
}

static PROGRAMS: Mutex<BTreeMap<usize, Program>> = Mutex::new(BTreeMap::new());

const OK: u32 = 0;
const INVALID_INPUT: u32 = 3;
const INVALID_PROGRAM: u32 = 4;
const COMPILATION: u32 = 6;

fn with(program: usize, run: impl FnOnce(&mut Program) -> u32) -> u32 {
    PROGRAMS.lock().get_mut(&program).map_or(INVALID_PROGRAM, run)
}

/// A text and the zero at its end.
fn text(bytes: &str) -> Vec<c_char> {
    bytes.bytes().chain([0]).map(|byte| byte as c_char).collect()
}

fn code(outcome: crate::outcome::Outcome<()>) -> u32 {
    outcome.map_or(INVALID_INPUT, |()| OK)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCreateProgram(
    program: Out<usize>,
    source: Text,
    _name: *const c_char,
    _headers: c_int,
    _texts: *const c_void,
    _names: *const c_void,
) -> u32 {
    let Ok(source) = source.get() else { return INVALID_INPUT };
    let handle = crate::api::handle();
    PROGRAMS.lock().insert(handle, Program { source, ..Program::default() });
    code(program.set(handle))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCompileProgram(program: usize, _count: c_int, _options: *const c_void) -> u32 {
    with(program, |program| match kernel::compile(&program.source) {
        Ok(image) => {
            program.image = image;
            OK
        }
        Err(log) => {
            eprintln!("software CUDA: {log}");
            program.log = log;
            COMPILATION
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetPTXSize(program: usize, size: Out<usize>) -> u32 {
    with(program, |program| code(size.set(program.image.len() + 1)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetPTX(program: usize, image: Out<c_char>) -> u32 {
    with(program, |program| code(image.set_all(&text(&program.image))))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetProgramLogSize(program: usize, size: Out<usize>) -> u32 {
    with(program, |program| code(size.set(program.log.len() + 1)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetProgramLog(program: usize, log: Out<c_char>) -> u32 {
    with(program, |program| code(log.set_all(&text(&program.log))))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcDestroyProgram(program: *const usize) -> u32 {
    // SAFETY: by the contract of the function, the address of a program or null.
    let handle = unsafe { program.as_ref() }.copied().unwrap_or_default();
    PROGRAMS.lock().remove(&handle).map_or(INVALID_PROGRAM, |_| OK)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetErrorString(error: u32) -> *const c_char {
    match error {
        OK => c"NVRTC_SUCCESS",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        _ => c"NVRTC_ERROR",
    }
    .as_ptr()
}
