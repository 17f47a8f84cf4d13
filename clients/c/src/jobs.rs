//! Loads and saves of an engine, on threads of the library.

use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvasir_client::data::{self as rust, BlockMeta, Jobs, Label, Namespace, Plan};
use kvasir_client::sync::Mutex;

use crate::client::{endpoint, name_space};
use crate::failure::{Failure, Status, call};
use crate::handles::Handles;
use crate::options::{self, JobOptions, Options};
use crate::raw;

/// Where blocks lie.
pub struct PlanHandle {
    _opaque: (),
}

/// Threads that load and save.
pub struct JobsHandle {
    _opaque: (),
}

/// A part of every block: of block n, the `len` bytes at `address` + n * `stride`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Run {
    pub address: *mut u8,
    pub len: usize,
    pub stride: usize,
}

/// What became of a job. Free it with `kvasir_v1_done_free`.
#[repr(C)]
pub struct Done {
    /// As the engine called it.
    pub job: u64,
    /// Bytes that were copied.
    pub bytes: u64,
    /// `count` answers, 1 or 0, of each block: a load has brought all of it, and it is what was stored; a save knows it to be
    /// stored, or being stored by another writer.
    pub here: *const u8,
    pub count: usize,
    /// The first failure, if it was not just that a block is not there; null otherwise.
    pub error: *const c_char,
    /// It is true of all blocks.
    pub ok: bool,
}

/// A [`Done`] and what its pointers name. It comes first, so that both have one address.
#[repr(C)]
struct Owned {
    public: Done,
    _here: Box<[u8]>,
    _error: Option<CString>,
}

struct OpenJobs {
    jobs: Jobs,
    ended: Mutex<VecDeque<rust::Done>>,
}

static PLANS: Handles<Arc<Plan>> = Handles::new("plan");
static JOBS: Handles<OpenJobs> = Handles::new("set of jobs");

/// Says once where `blocks` blocks lie, in how many runs, and writes the new plan to `plan`. A block is the bytes of its runs,
/// one behind the other.
///
/// The memory stays until the plan is freed and its jobs have ended; while a job names a block, nobody else writes to it, and
/// nobody reads one that is loaded.
///
/// # Safety
/// As above; each pointer is null or what its type and count say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_plan_new(
    runs: *const Run,
    count: usize,
    blocks: usize,
    plan: *mut *mut PlanHandle,
) -> Status {
    call(|| {
        raw::check("where the plan goes", plan, 1)?;
        // SAFETY: the caller's word, as above.
        let runs = unsafe { raw::list("the runs", runs, count) }?;
        let run =
            |run: &Run| rust::Run { addr: run.address.expose_provenance(), len: run.len, stride: run.stride };
        let runs: Vec<rust::Run> = runs.iter().map(run).collect();
        // SAFETY: the caller's word, as above.
        let made = unsafe { Plan::new(&runs, blocks) }?;
        let handle = PLANS.add(Arc::new(made));
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the plan goes", plan, std::ptr::without_provenance_mut(handle)) }
    })
}

/// Frees a plan. Jobs that name it go on.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_v1_plan_free(plan: *mut PlanHandle) -> Status {
    call(|| PLANS.remove(plan).map(drop))
}

/// Starts the threads of jobs at `endpoint`, and writes their handle to `jobs`. They connect when the first job comes, so the
/// host need not run yet. Both options may be null.
///
/// # Safety
/// Each pointer is null or what its type says; texts end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_jobs_start(
    endpoint: *const c_char,
    options: *const Options,
    job_options: *const JobOptions,
    jobs: *mut *mut JobsHandle,
) -> Status {
    call(|| {
        raw::check("where the jobs go", jobs, 1)?;
        // SAFETY: the caller's word, as above.
        let (endpoint, options, job_options) = unsafe {
            (self::endpoint(endpoint)?, options::options(options)?, options::job_options(job_options)?)
        };
        let started = Jobs::start(&endpoint, &options, job_options)?;
        let handle = JOBS.add(OpenJobs { jobs: started, ended: Mutex::default() });
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the jobs go", jobs, std::ptr::without_provenance_mut(handle)) }
    })
}

/// A block, and its number in a plan.
type Numbered = (BlockMeta, usize);

/// The blocks of a job: hashes that follow each other, and numbers in a plan.
struct Blocks<'a> {
    plan: Arc<Plan>,
    name_space: Namespace,
    hashes: &'a [u8],
    hash_len: usize,
    numbers: &'a [u32],
}

impl Blocks<'_> {
    /// # Safety
    /// As for [`kvasir_v1_jobs_load`].
    unsafe fn new(
        plan: *const PlanHandle,
        digest: *const u8,
        (hashes, hash_len): (*const u8, usize),
        (blocks, count): (*const u32, usize),
    ) -> Result<Self, Failure> {
        let bytes = hash_len.checked_mul(count).filter(|_| hash_len > 0);
        let bytes = bytes.ok_or_else(|| Failure::invalid(format!("{count} hashes of {hash_len} B")))?;
        // SAFETY: the caller's word.
        unsafe {
            Ok(Self {
                plan: PLANS.get(plan)?.as_ref().clone(),
                name_space: name_space(digest)?,
                hashes: raw::list("the hashes", hashes, bytes)?,
                hash_len,
                numbers: raw::list("the blocks", blocks, count)?,
            })
        }
    }

    /// Key, number and size of each, and its label.
    fn named(&self) -> Result<(Vec<Numbered>, Vec<Label>), Failure> {
        let block = |(hash, &number): (&[u8], &u32)| {
            let number = number as usize;
            let none = || rust::JobError::NoBlock { block: number, blocks: self.plan.blocks() };
            let payload = self.plan.block_bytes(number).ok_or_else(none)?;
            let large = || Failure::invalid(format!("a block of {payload} B leaves no room for its label"));
            let size = payload.checked_add(Label::BYTES).ok_or_else(large)?;
            let meta = BlockMeta::single(self.name_space.key(hash), size);
            Ok(((meta, number), self.name_space.label(hash, payload)))
        };
        let each = self.hashes.chunks(self.hash_len).zip(self.numbers).map(block);
        Ok(each.collect::<Result<Vec<_>, Failure>>()?.into_iter().unzip())
    }
}

/// Gives a load: block n of the plan for each n of `blocks`, from the block that the engine names by the hash at the same place.
/// The hashes follow each other, `hash_len` bytes each; `name_space` has 32 bytes. What is loaded is compared with its
/// label: another block under the same key is a failure, never a hit.
///
/// A job that was taken is reported once by `kvasir_v1_jobs_next`, after copying has stopped. `job` is for the caller to choose.
///
/// # Safety
/// Each pointer is null or what its type and count say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_jobs_load(
    jobs: *const JobsHandle,
    job: u64,
    plan: *const PlanHandle,
    name_space: *const u8,
    hashes: *const u8,
    hash_len: usize,
    blocks: *const u32,
    count: usize,
) -> Status {
    call(|| {
        let jobs = JOBS.get(jobs)?;
        // SAFETY: the caller's word, as above.
        let given = unsafe { Blocks::new(plan, name_space, (hashes, hash_len), (blocks, count)) }?;
        let (metas, labels) = given.named()?;
        let blocks = metas.into_iter().map(|(meta, number)| (meta.key, number)).collect();
        Ok(jobs.jobs.load_labelled(job, &given.plan, blocks, labels)?)
    })
}

/// Gives a save, with the same arguments: each block is stored with a label of its own, which makes it larger than in the plan.
///
/// # Safety
/// Each pointer is null or what its type and count say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_jobs_save(
    jobs: *const JobsHandle,
    job: u64,
    plan: *const PlanHandle,
    name_space: *const u8,
    hashes: *const u8,
    hash_len: usize,
    blocks: *const u32,
    count: usize,
) -> Status {
    call(|| {
        let jobs = JOBS.get(jobs)?;
        // SAFETY: the caller's word, as above.
        let given = unsafe { Blocks::new(plan, name_space, (hashes, hash_len), (blocks, count)) }?;
        let (metas, labels) = given.named()?;
        Ok(jobs.jobs.save_labelled(job, &given.plan, metas, labels)?)
    })
}

/// Writes a descriptor to `fd` that is readable when jobs have ended. Only wait for it, and then call `kvasir_v1_jobs_next` until
/// it has nothing more. It is closed by `kvasir_v1_jobs_free`.
///
/// # Safety
/// `fd` is null or room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_jobs_event_fd(jobs: *const JobsHandle, fd: *mut c_int) -> Status {
    // SAFETY: the caller's word, as above.
    call(|| unsafe { raw::set("where the descriptor goes", fd, JOBS.get(jobs)?.jobs.event_fd().as_raw_fd()) })
}

/// Writes the next job that has ended to `done`, or null if there is none. Never waits.
///
/// # Safety
/// `done` is null or room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_jobs_next(jobs: *const JobsHandle, done: *mut *mut Done) -> Status {
    call(|| {
        raw::check("where the job goes", done, 1)?;
        let jobs = JOBS.get(jobs)?;
        let mut ended = jobs.ended.lock();
        if ended.is_empty() {
            ended.extend(jobs.jobs.drain());
        }
        let next = ended.pop_front().map_or(std::ptr::null_mut(), |next| Box::into_raw(owned(next)).cast());
        // SAFETY: the caller's word, as above.
        unsafe { raw::set("where the job goes", done, next) }
    })
}

fn owned(done: rust::Done) -> Box<Owned> {
    let here: Box<[u8]> = done.blocks.iter().map(|&here| here.into()).collect();
    let error =
        done.error.map(|error| CString::new(error.to_string().replace('\0', "?")).unwrap_or_default());
    let public = Done {
        job: done.job,
        bytes: done.bytes,
        here: here.as_ptr(),
        count: here.len(),
        error: error.as_ref().map_or(std::ptr::null(), |text| text.as_ptr()),
        ok: done.ok,
    };
    Box::new(Owned { public, _here: here, _error: error })
}

/// Frees what `kvasir_v1_jobs_next` gave. Null is fine.
///
/// # Safety
/// `done` is null, or came from `kvasir_v1_jobs_next` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_done_free(done: *mut Done) {
    if !done.is_null() {
        // SAFETY: the caller's word; `next` made it so, and it is the beginning of an `Owned`.
        drop(unsafe { Box::from_raw(done.cast::<Owned>()) });
    }
}

/// Takes no more jobs, waits until copying has stopped, and reports all that are left as failed. They can still be had by
/// `kvasir_v1_jobs_next`.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_v1_jobs_close(jobs: *const JobsHandle) -> Status {
    call(|| {
        JOBS.get(jobs)?.jobs.close();
        Ok(())
    })
}

/// Closes jobs if they are not, and frees them with all that nobody took.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_v1_jobs_free(jobs: *mut JobsHandle) -> Status {
    call(|| {
        // Here and not by the last one that uses it, so that copying has stopped when this returns.
        JOBS.remove(jobs)?.jobs.close();
        Ok(())
    })
}
