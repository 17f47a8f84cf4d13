//! Kernels: the source of which a PTX says that it is made is compiled by the C++ compiler, loaded as a shared library and run
//! by a stream's thread.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock};

use crate::memory;
use crate::outcome::{CudaError, Outcome};

/// The one source, and how the image begins that is made of it.
const SOURCE: &str = include_str!("../../../dataplane/gpu/src/memory/paged/gather.cu");
const IMAGE: &str = "// gather.cu ";
const KERNEL: &str = "extern \"C\" __global__ void ";

type Pack = unsafe extern "C" fn(*mut *mut c_void) -> *mut c_void;
type Run = unsafe extern "C" fn(*mut c_void, *const u32);

struct Module {
    device: usize,
    library: usize,
    functions: Vec<usize>,
}

#[derive(Clone)]
pub(crate) struct Function(Arc<Entry>);

struct Entry {
    device: usize,
    pack: Pack,
    run: Run,
}

/// A launch, with the arguments as they were when it was submitted.
pub(crate) struct Launch {
    entry: Arc<Entry>,
    arguments: usize,
    dims: [u32; 6],
}

static MODULES: Mutex<BTreeMap<usize, Module>> = Mutex::new(BTreeMap::new());
static FUNCTIONS: Mutex<BTreeMap<usize, Function>> = Mutex::new(BTreeMap::new());

/// Compiles the source to a library, once, and returns where that lies.
fn library() -> Outcome<&'static CString> {
    static LIBRARY: LazyLock<Result<CString, String>> = LazyLock::new(compile);
    LIBRARY.as_ref().map_err(|error| {
        eprintln!("software CUDA: {error}");
        CudaError::INVALID_IMAGE
    })
}

fn compile() -> Result<CString, String> {
    let path = std::env::temp_dir().join(format!("kvasir-cuda-{}.so", std::process::id()));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o"]).arg(&path);
    compiler.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut running = compiler.spawn().map_err(|error| format!("no C++ compiler: {error}"))?;
    if let Some(mut input) = running.stdin.take() {
        // If it ends early, its own messages say why.
        let _ = input.write_all(whole(SOURCE).as_bytes());
    }
    let output = running.wait_with_output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let library = std::fs::read(&path).map_err(|error| error.to_string())?;
    let _ = std::fs::remove_file(&path);
    let file = memory::create("software-cuda-module", 0).map_err(|_| "no memory".to_owned())?;
    let mut file = File::from(file);
    file.write_all(&library).map_err(|error| error.to_string())?;
    // Left open for as long as the process lives: the image may be loaded at any time.
    let path = format!("/proc/self/fd/{}", OwnedFd::from(file).into_raw_fd());
    CString::new(path).map_err(|error| error.to_string())
}

fn whole(source: &str) -> String {
    let mut text = format!("{}\n{source}\n{}", include_str!("before.hh"), include_str!("after.hh"));
    for name in source.split(KERNEL).skip(1).filter_map(|rest| rest.split('(').next()) {
        text += &format!(
            "extern \"C\" void* software_pack_{name}(void** from) {{ return software::pack({name}, from); }}\n\
             extern \"C\" void software_run_{name}(void* packed, const unsigned int* dims) {{ software::run({name}, packed, dims); }}\n"
        );
    }
    text
}

pub(crate) fn load(device: usize, image: &str) -> Outcome<usize> {
    if !image.starts_with(IMAGE) {
        return Err(CudaError::INVALID_IMAGE);
    }
    let path = library()?;
    // SAFETY: a text that ends with a zero; the library has no initialisers of its own.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(CudaError::INVALID_IMAGE);
    }
    let handle = crate::api::handle();
    let module = Module { device, library: library as usize, functions: Vec::new() };
    MODULES.lock().insert(handle, module);
    Ok(handle)
}

pub(crate) fn unload(handle: usize) -> Outcome<()> {
    let module = MODULES.lock().remove(&handle).ok_or(CudaError::INVALID_HANDLE)?;
    let mut functions = FUNCTIONS.lock();
    module.functions.iter().for_each(|function| drop(functions.remove(function)));
    // The library stays loaded: a launch that comes too late would otherwise crash in a place that says nothing.
    Ok(())
}

pub(crate) fn count(device: usize) -> usize {
    MODULES.lock().values().filter(|module| module.device == device).count()
}

pub(crate) fn function(module: usize, name: &str) -> Outcome<usize> {
    let mut modules = MODULES.lock();
    let module = modules.get_mut(&module).ok_or(CudaError::INVALID_HANDLE)?;
    let symbol = |kind: &str| {
        let symbol = CString::new(format!("software_{kind}_{name}")).map_err(|_| CudaError::NOT_FOUND)?;
        // SAFETY: the library is loaded, and stays so.
        let found = unsafe { libc::dlsym(module.library as *mut c_void, symbol.as_ptr()) };
        if found.is_null() { Err(CudaError::NOT_FOUND) } else { Ok(found) }
    };
    let (pack, run) = (symbol("pack")?, symbol("run")?);
    // SAFETY: `whole` declares the functions of these names so.
    let (pack, run) = unsafe {
        (std::mem::transmute::<*mut c_void, Pack>(pack), std::mem::transmute::<*mut c_void, Run>(run))
    };
    let handle = crate::api::handle();
    FUNCTIONS.lock().insert(handle, Function(Arc::new(Entry { device: module.device, pack, run })));
    module.functions.push(handle);
    Ok(handle)
}

pub(crate) fn launch(function: usize, dims: [u32; 6], arguments: *mut *mut c_void) -> Outcome<Launch> {
    let Function(entry) = FUNCTIONS.lock().get(&function).cloned().ok_or(CudaError::INVALID_HANDLE)?;
    if dims.contains(&0) || dims[3..].iter().product::<u32>() > 1024 || arguments.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: by the contract of `cuLaunchKernel`, one address for each argument that the kernel declares.
    let arguments = unsafe { (entry.pack)(arguments) } as usize;
    Ok(Launch { entry, arguments, dims })
}

impl Launch {
    pub(crate) fn run(mut self) {
        let arguments = std::mem::take(&mut self.arguments) as *mut c_void;
        memory::with_access(self.entry.device, || {
            // SAFETY: the arguments were packed for this kernel and are used once; the memory that they name is the
            // caller's to answer for.
            unsafe { (self.entry.run)(arguments, self.dims.as_ptr()) };
        });
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if self.arguments != 0 {
            // SAFETY: packed for this kernel, and not used any more.
            unsafe { (self.entry.run)(self.arguments as *mut c_void, std::ptr::null()) };
        }
    }
}
