//! A driver that refuses, a GPU that fails, jobs that nobody wants any more.

use std::ffi::{CString, c_char};
use std::process::Command;

use super::*;

const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;

type Fail = unsafe extern "C" fn(*const c_char, u32, u32) -> u32;

/// How the software device is told to fail; a real driver is not.
pub(super) fn software() -> Option<Fail> {
    // SAFETY: a device is open, so the library is loaded already, and stays so.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: the type is that of `tests/cuda`.
    unsafe { driver.get::<Fail>(b"kvasir_cuda_fail") }.map(|fail| *fail).ok()
}

/// Lets a function of the driver fail once, after some calls that succeed; `"work"` is the work of a stream, after which the
/// GPU refuses everything. Returns whether that is possible here. Call it with a device open.
fn order(function: &str, after: u32, error: u32) -> bool {
    let Some(fail) = software() else {
        println!("skipped: this driver fails on its own terms");
        return false;
    };
    let function = CString::new(function).unwrap();
    // SAFETY: a text that ends with a zero, read before the call returns.
    assert_eq!(unsafe { fail(function.as_ptr(), after, error) }, 0);
    true
}

/// By which a job's copies go: what is tried first is given up where an earlier call of the driver fails.
#[derive(Clone, Copy, PartialEq)]
enum By {
    Kernel,
    Batch,
    Copies,
}

/// What a job calls the driver for: the function, how many of its calls succeed before, and whether the job fails by it. Without
/// the kernel it takes the batch, and without an event it waits for all of its stream.
const CALLS: [(By, &str, u32, bool); 15] = [
    (By::Kernel, "cuEventQuery", 0, true),
    (By::Kernel, "cuStreamCreate", 0, true),
    (By::Kernel, "cuLaunchKernel", 0, true),
    (By::Kernel, "cuMemcpyAsync", 0, true),
    (By::Kernel, "cuEventCreate", 0, false),
    (By::Kernel, "cuEventRecord", 0, true),
    (By::Kernel, "cuEventSynchronize", 0, true),
    (By::Batch, "cuMemcpyBatchAsync_v2", 0, true),
    (By::Batch, "cuMemcpyBatchAsync_v2", 3, true),
    (By::Batch, "cuEventSynchronize", 0, true),
    (By::Batch, "cuEventCreate", 0, false),
    (By::Batch, "cuEventRecord", 0, false),
    (By::Copies, "cuMemcpyAsync", 0, true),
    (By::Copies, "cuMemcpyAsync", 4, true),
    // Only where nothing goes straight.
    (By::Batch, "cuMemHostAlloc", 0, true),
];

/// Whichever call it is, nothing stays behind, and the next job is fine. With the jobs ends the device, whose context aborts if
/// anything of it is left.
#[test]
#[ignore = "needs a CUDA device"]
fn a_driver_that_refuses_a_call_fails_the_job_and_no_other() {
    let host = Host::small();
    for endpoint in [host.unix(), host.tcp()] {
        let straight = !matches!(endpoint, Endpoint::Tcp(_));
        let calls = CALLS.iter().filter(|(_, function, ..)| !straight || *function != "cuMemHostAlloc");
        for &(by, function, after, fails) in calls {
            for loads in [true, false] {
                let (gpu, options) = (Gpu::new(16), options());
                // Loaded once for the device.
                if by != By::Kernel && !order("cuModuleLoadData", 0, OUT_OF_MEMORY) {
                    return;
                }
                let plan = gpu.plan();
                (0..8).for_each(|n| gpu.set(n, &bytes_of(n as u64, SIZE)));
                is_all(&save(&started(&endpoint, &options), gpu.ready(&plan), 0..8, 0), 8);
                let jobs = started(&endpoint, &options);
                // The first to fail is given up, by the thread that met it.
                if by == By::Copies && order("cuMemcpyBatchAsync_v2", 0, OUT_OF_MEMORY) {
                    let done = if loads {
                        load(&jobs, gpu.ready(&plan), 0..8, 8)
                    } else {
                        save(&jobs, gpu.ready(&plan), 20..28, 0)
                    };
                    assert!(!done.ok, "{done:?}");
                }
                // Marked before, since that has calls of its own.
                let memory = gpu.ready(&plan);
                if !order(function, after, OUT_OF_MEMORY) {
                    return;
                }
                let done = if loads { load(&jobs, memory, 0..8, 8) } else { save(&jobs, memory, 20..28, 0) };
                if fails {
                    let text = done.error.as_ref().map(ToString::to_string).unwrap_or_default();
                    assert!(!done.ok && text.contains("OUT_OF_MEMORY"), "{function}: {done:?}");
                    assert!(done.blocks.iter().all(|here| !here) && done.bytes == 0, "{function}: {done:?}");
                } else {
                    is_all(&done, 8);
                }
                is_all(&save(&jobs, gpu.ready(&plan), 30..38, 0), 8);
                is_all(&load(&jobs, gpu.ready(&plan), 30..38, 8), 8);
                assert!((0..8).all(|n| gpu.get(8 + n) == bytes_of(n as u64, SIZE)), "{function}");
                drop(jobs);
                let client = Client::connect(&endpoint, options.clone()).unwrap();
                client.remove(&(0..38).map(|n| named(n).0.key).collect::<Vec<_>>()).unwrap();
                host.until(|host| host.store.metrics().leases == 0 && host.store.metrics().reservations == 0);
            }
        }
    }
}

/// What cannot be registered goes another way, and that is said.
#[test]
#[ignore = "needs a CUDA device"]
fn a_pool_that_cannot_be_registered_is_gone_round() {
    let host = Host::small();
    let (gpu, options) = (Gpu::new(8), options());
    let (plan, jobs) = (gpu.plan(), started(&host.unix(), &options));
    (0..4).for_each(|n| gpu.set(n, &bytes_of(n as u64, SIZE)));
    let memory = gpu.ready(&plan);
    if !order("cuMemHostRegister_v2", 0, OUT_OF_MEMORY) {
        return;
    }
    is_all(&save(&jobs, memory, 0..4, 0), 4);
    is_all(&load(&jobs, gpu.ready(&plan), 0..4, 4), 4);
    assert!((0..4).all(|n| gpu.get(4 + n) == bytes_of(n as u64, SIZE)));
    let said = options.counts.unregistered.get().unwrap();
    assert!(said.contains("registering memory of the host") && said.contains("OUT_OF_MEMORY"), "{said}");
    // It was tried once: another refusal would have been met.
    assert!(order("cuMemHostRegister_v2", 0, OUT_OF_MEMORY));
    is_all(&load(&jobs, gpu.ready(&plan), 0..4, 4), 4);
    let again = started(&host.unix(), &Options { counts: Arc::default(), ..options });
    is_all(&load(&again, gpu.ready(&plan), 0..4, 4), 4);
}

#[test]
#[ignore = "needs a CUDA device"]
fn jobs_that_are_closed_have_let_go_of_the_gpu() {
    let host = Host::small();
    for endpoint in [host.unix(), host.tcp()] {
        for busy in [true, false] {
            let (mut gpu, jobs) = (Gpu::new(128), started(&endpoint, &options()));
            let plan = gpu.plan();
            (0..64).for_each(|n| gpu.set(n, &bytes_of(n as u64, SIZE)));
            is_all(&save(&jobs, gpu.ready(&plan), 0..64, 0), 64);
            if busy {
                gpu.compute(&[]);
            }
            let memory = gpu.ready(&plan);
            let (blocks, labels) = loads(0..64, 64);
            jobs.load_labelled(1, memory.clone(), blocks, labels).unwrap();
            let (blocks, labels) = saves(100..164, 0);
            jobs.save_labelled(2, memory, blocks, labels).unwrap();
            let mut done = Vec::new();
            // Until one of them is copied, or was.
            while !busy && done.is_empty() {
                let now = host.store.metrics();
                if now.leases + now.reservations > 0 {
                    break;
                }
                done = jobs.drain();
            }
            jobs.close();
            done.extend(jobs.drain());
            assert_eq!(done.len(), 2);
            assert!(!busy || done.iter().all(|done| !done.ok), "{done:?}");
            assert_eq!(Arc::strong_count(&plan), 1, "nobody knows the blocks any more");
            gpu.late.clear();
            let device = Arc::clone(&gpu.device);
            drop((plan, gpu));
            // A copy that comes to freed memory ends the device.
            device.memory().unwrap();
            let client = Client::connect(&endpoint, options()).unwrap();
            client.remove(&(0..164).map(|n| named(n).0.key).collect::<Vec<_>>()).unwrap();
            host.until(|host| host.store.metrics().leases == 0 && host.store.metrics().reservations == 0);
        }
    }
}

/// An engine whose stream never comes there costs a job its time, and nothing else.
#[test]
#[ignore = "needs a CUDA device"]
fn a_stream_that_is_late_costs_a_job_its_time() {
    let host = Host::small();
    let mut gpu = Gpu::new(8);
    let hasty = JobOptions { load_time: Duration::from_millis(1), ..JobOptions::default() };
    let jobs = Jobs::start(&host.unix(), &options(), hasty).unwrap();
    let plan = gpu.plan();
    gpu.compute(&[]);
    let done = load(&jobs, gpu.ready(&plan), 0..1, 0);
    let error = done.error.unwrap();
    assert!(matches!(error, ClientError::StreamLate { device: 0 }) && error.retryable(), "{error}");
}

const BROKEN: &str = "KVASIR_GPU_BROKEN";

/// In a process of its own, because the device is lost to it.
#[test]
#[ignore = "needs a CUDA device"]
fn a_gpu_that_fails_fails_its_jobs() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let (_, module) = module_path!().split_once("::").unwrap();
    let name = format!("{module}::the_process_whose_gpu_fails");
    child.args(["--exact", &name, "--ignored", "--nocapture"]).env(BROKEN, "yes");
    assert!(child.status().unwrap().success());
}

/// The other half of the test above. Does nothing when it is run by itself.
#[test]
#[ignore = "needs a CUDA device"]
fn the_process_whose_gpu_fails() {
    if std::env::var(BROKEN).is_err() {
        return;
    }
    let host = Host::small();
    let (gpu, jobs) = (Gpu::new(8), started(&host.unix(), &options()));
    let plan = gpu.plan();
    is_all(&save(&jobs, gpu.ready(&plan), 0..4, 0), 4);
    let memory = gpu.ready(&plan);
    if !order("work", 1, ILLEGAL_ADDRESS) {
        return;
    }
    for _ in 0..2 {
        for done in [load(&jobs, memory.clone(), 0..4, 4), save(&jobs, memory.clone(), 10..14, 0)] {
            let text = done.error.as_ref().map(ToString::to_string).unwrap_or_default();
            assert!(!done.ok && text.contains("ILLEGAL_ADDRESS"), "{done:?}");
        }
    }
    host.until(|host| host.store.metrics().leases == 0 && host.store.metrics().reservations == 0);
    // The host's other users notice nothing.
    let client = Client::connect(&host.unix(), options()).unwrap();
    assert_eq!(client.exists(&[named(0).0.key, named(10).0.key]).unwrap(), [true, false]);
}
