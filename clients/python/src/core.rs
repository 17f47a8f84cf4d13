//! `Core`: one host, as the Python package sees it.

mod blocks;
mod handing;
mod inner;
mod tally;

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvasir_client::data::{
    BlockKey, Client, ClientError, Endpoint, JobOptions, Label, Options, Put, Reconnecting,
};
use kvasir_client::sync::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use self::blocks::{Blocks, named, whole};
use self::handing::{HandOvers, Job};
pub(crate) use self::inner::close_all;
use self::inner::{Inner, OPEN};
use self::tally::Tallies;
use crate::bytes;
use crate::device::Place;
use crate::errors::{Error, client_error};
use crate::jobs::{Kept, Table};
use crate::link::Link;
use crate::memory::Buffers;

/// The most keys that a host takes in one call.
const KEYS_MAX: usize = 4096;
/// How long a host may say nothing in the middle of a call, whatever the call's own limit is.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// A host's blocks: questions about them, and jobs that copy them. See `_core.pyi`.
#[pyclass(frozen, module = "kvasir._core")]
pub(crate) struct Core {
    /// `None` only while it is dropped.
    inner: Option<Arc<Inner>>,
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (host, *, token = "", tenant = 0, load_threads = 8, save_threads = 2, match_ms = 20,
        load_ms = 2000, save_ms = 30000, verify = true, workload_class = 0))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn new(
        host: &str,
        token: &str,
        tenant: u16,
        load_threads: usize,
        save_threads: usize,
        match_ms: u64,
        load_ms: u64,
        save_ms: u64,
        verify: bool,
        workload_class: u16,
    ) -> PyResult<Self> {
        let endpoint: Endpoint = host.parse().map_err(|error| client_error(&error))?;
        if ![load_threads, save_threads].iter().all(|count| (1..=64).contains(count)) {
            return Err(PyValueError::new_err("load_threads and save_threads are 1 to 64"));
        }
        if match_ms == 0 || load_ms == 0 || save_ms == 0 {
            return Err(PyValueError::new_err("match_ms, load_ms and save_ms are at least 1"));
        }
        let [match_time, load_time, save_time] = [match_ms, load_ms, save_ms].map(Duration::from_millis);
        let (token, timeout) = (token.to_owned(), SILENCE_MAX);
        let options = Options { verify, tenant, token, timeout, ..Options::default() };
        let (class, defaults) = (workload_class, JobOptions::default());
        let job_options = JobOptions { load_threads, save_threads, load_time, save_time, class, ..defaults };
        let connection = || Reconnecting::new(endpoint.clone(), options.clone());
        let inner = Arc::new(Inner {
            pid: std::process::id(),
            asks: Link::new(connection(), match_time),
            calls: connection(),
            endpoint,
            options,
            job_options,
            jobs: Mutex::default(),
            closed: AtomicBool::new(false),
            hand_overs: HandOvers::default(),
            table: Table::default(),
            tallies: Tallies::default(),
        });
        let mut open = OPEN.lock();
        open.retain(|inner| inner.strong_count() > 0);
        open.push(Arc::downgrade(&inner));
        Ok(Self { inner: Some(inner) })
    }

    #[pyo3(signature = (namespace, runs, blocks, owner = None, *, device = None))]
    fn plan(
        &self,
        py: Python<'_>,
        namespace: &[u8],
        runs: &[u8],
        blocks: usize,
        owner: Option<Py<PyAny>>,
        device: Option<usize>,
    ) -> PyResult<u64> {
        let inner = self.inner()?;
        let (namespace, runs) = (bytes::namespace(namespace)?, bytes::runs(runs)?);
        let place = py.detach(|| Place::new(device, &runs, blocks))?;
        bytes::with_label(place.block_bytes(0).unwrap_or(0))?;
        Ok(inner.table.plan(place, namespace, owner))
    }

    fn unplan(&self, plan: u64) -> PyResult<()> {
        self.inner()?.table.unplan(plan).map(drop)
    }

    fn prefix(
        &self,
        py: Python<'_>,
        namespaces: Vec<Vec<u8>>,
        hashes: &[u8],
        hash_bytes: usize,
    ) -> PyResult<usize> {
        let inner = self.open()?;
        let hashes = bytes::hashes(hashes, hash_bytes)?;
        let spaces = namespaces.iter().map(|space| bytes::namespace(space)).collect::<PyResult<Vec<_>>>()?;
        if spaces.is_empty() {
            return Err(PyValueError::new_err(
                "no namespace is given; a run is one of blocks in each of them",
            ));
        }
        py.detach(|| {
            inner.asks.ask(|client| {
                let mut run = hashes.len();
                for space in &spaces {
                    if run == 0 {
                        break;
                    }
                    let keys = bytes::keys(space, hashes.clone().take(run));
                    run = leading(client, &keys)?;
                }
                Ok(run)
            })
        })
    }

    fn exists<'py>(
        &self,
        py: Python<'py>,
        namespace: &[u8],
        hashes: &[u8],
        hash_bytes: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.open()?;
        let (namespace, hashes) = (bytes::namespace(namespace)?, bytes::hashes(hashes, hash_bytes)?);
        let found = py.detach(|| {
            let keys = bytes::keys(&namespace, hashes);
            inner.asks.ask(|client| in_batches(&keys, |keys| client.exists(keys)))
        })?;
        Ok(flags(py, &found))
    }

    /// Where a load would get each block from: [`Source`](kvasir_client::data::Source), one byte for each.
    fn tiers<'py>(
        &self,
        py: Python<'py>,
        namespace: &[u8],
        hashes: &[u8],
        hash_bytes: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.open()?;
        let (namespace, hashes) = (bytes::namespace(namespace)?, bytes::hashes(hashes, hash_bytes)?);
        let found = py.detach(|| {
            let keys = bytes::keys(&namespace, hashes);
            // This is for metrics and events only.
            inner.asks.ask_aside(|client| in_batches(&keys, |keys| client.tiers(keys)))
        })?;
        Ok(PyBytes::new(py, &found.into_iter().map(|source| source as u8).collect::<Vec<_>>()))
    }

    /// A page of what has left the host: where to go on, whether something was missed, and keys.
    fn removals<'py>(&self, py: Python<'py>, since: u64) -> PyResult<(u64, bool, Vec<Bound<'py, PyBytes>>)> {
        let inner = self.open()?;
        // A host that is too old for this one may answer other questions.
        let ask = |client: &Client| match client.removals(since) {
            Err(error @ ClientError::TooOld { .. }) => Ok(Err(error)),
            answer => answer.map(Ok),
        };
        let answer = py.detach(|| inner.asks.ask(ask))?.map_err(|error| client_error(&error))?;
        let keys = answer.keys.iter().map(|key| PyBytes::new(py, &key.0.to_le_bytes()));
        Ok((answer.next, answer.lost, keys.collect()))
    }

    /// The keys under which the host has these blocks, as `removals` calls them.
    #[staticmethod]
    fn keys<'py>(
        py: Python<'py>,
        namespace: &[u8],
        hashes: &[u8],
        hash_bytes: usize,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let keys = bytes::keys(&bytes::namespace(namespace)?, bytes::hashes(hashes, hash_bytes)?);
        Ok(keys.iter().map(|key| PyBytes::new(py, &key.0.to_le_bytes())).collect())
    }

    fn hold(
        &self,
        py: Python<'_>,
        namespaces: Vec<Vec<u8>>,
        hashes: &[u8],
        hash_bytes: usize,
        ms: u64,
    ) -> PyResult<()> {
        let inner = self.open()?;
        let hashes = bytes::hashes(hashes, hash_bytes)?;
        let spaces = namespaces.iter().map(|space| bytes::namespace(space)).collect::<PyResult<Vec<_>>>()?;
        let time = Duration::from_millis(ms);
        py.detach(|| {
            let keys: Vec<BlockKey> =
                spaces.iter().flat_map(|space| bytes::keys(space, hashes.clone())).collect();
            // A block that is not held may be gone when it is loaded, which is a miss like any other.
            let _ = inner.asks.ask(|client| in_batches(&keys, |keys| client.hold(keys, time)));
        });
        Ok(())
    }

    #[pyo3(signature = (job, plan, hashes, hash_bytes, blocks, *, stream = 0))]
    #[expect(clippy::too_many_arguments, reason = "those of Python")]
    fn load(
        &self,
        py: Python<'_>,
        job: u64,
        plan: u64,
        hashes: &[u8],
        hash_bytes: usize,
        blocks: &[u8],
        stream: u64,
    ) -> PyResult<()> {
        self.transfer(py, false, job, (plan, stream), (hashes, hash_bytes), blocks)
    }

    #[pyo3(signature = (job, plan, hashes, hash_bytes, blocks, *, stream = 0))]
    #[expect(clippy::too_many_arguments, reason = "those of Python")]
    fn save(
        &self,
        py: Python<'_>,
        job: u64,
        plan: u64,
        hashes: &[u8],
        hash_bytes: usize,
        blocks: &[u8],
        stream: u64,
    ) -> PyResult<()> {
        self.transfer(py, true, job, (plan, stream), (hashes, hash_bytes), blocks)
    }

    fn load_into(
        &self,
        job: u64,
        namespace: &[u8],
        keys: Vec<Vec<u8>>,
        buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.transfer_buffers(false, job, namespace, &keys, &buffers)
    }

    fn save_from(
        &self,
        job: u64,
        namespace: &[u8],
        keys: Vec<Vec<u8>>,
        buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.transfer_buffers(true, job, namespace, &keys, &buffers)
    }

    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn hand_over(
        &self,
        py: Python<'_>,
        job: u64,
        plan: u64,
        peer: &str,
        transfer: &[u8],
        part: u32,
        hashes: &[u8],
        hash_bytes: usize,
        blocks: &[u8],
        layers: u32,
    ) -> PyResult<()> {
        let job = Job { job, plan, transfer, hashes: (hashes, hash_bytes), blocks, layers };
        self.open()?.hand_over(py, &job, peer, part)
    }

    fn layer_ready(&self, job: u64, layer: u32) -> PyResult<bool> {
        Ok(self.inner()?.layer_ready(job, layer))
    }

    fn abandon(&self, job: u64) -> PyResult<bool> {
        Ok(self.inner()?.abandon(job))
    }

    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn arrive(
        &self,
        py: Python<'_>,
        job: u64,
        plan: u64,
        transfer: &[u8],
        hashes: &[u8],
        hash_bytes: usize,
        first: usize,
        blocks: &[u8],
        layers: u32,
        ms: u64,
    ) -> PyResult<()> {
        let job = Job { job, plan, transfer, hashes: (hashes, hash_bytes), blocks, layers };
        self.open()?.arrive(py, &job, first, ms)
    }

    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Vec<Ended<'py>>> {
        let inner = self.inner()?;
        let jobs = inner.jobs.lock().clone();
        let done = jobs.map(|jobs| jobs.drain()).unwrap_or_default();
        Ok(done.into_iter().filter_map(|done| inner.ended(py, done)).collect())
    }

    fn event_fd(&self) -> PyResult<RawFd> {
        Ok(self.open()?.jobs()?.event_fd().as_raw_fd())
    }

    fn remove<'py>(
        &self,
        py: Python<'py>,
        namespace: &[u8],
        keys: Vec<Vec<u8>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let namespace = bytes::namespace(namespace)?;
        let keys = bytes::keys(&namespace, keys.iter().map(Vec::as_slice));
        let removed = self.call(py, |client| in_batches(&keys, |keys| client.remove(keys)))?;
        Ok(flags(py, &removed))
    }

    /// Bytes of the payload of each block, and `None` for one that is not there.
    fn sizes(&self, py: Python<'_>, namespace: &[u8], keys: Vec<Vec<u8>>) -> PyResult<Vec<Option<u32>>> {
        let namespace = bytes::namespace(namespace)?;
        let keys = bytes::keys(&namespace, keys.iter().map(Vec::as_slice));
        let stats = self.call(py, |client| in_batches(&keys, |keys| client.stat(keys)))?;
        // A block that is smaller than a label has none, and will be refused for that.
        Ok(stats.into_iter().map(|stat| stat.map(|stat| stat.size.saturating_sub(Label::BYTES))).collect())
    }

    /// Stores one buffer and waits for it. Returns false if the block was there, or is being stored by somebody else.
    fn put(&self, py: Python<'_>, namespace: &[u8], key: &[u8], buffer: Bound<'_, PyAny>) -> PyResult<bool> {
        let (namespace, buffers) = (bytes::namespace(namespace)?, Buffers::open(&[buffer], false)?);
        let plan = buffers.plan()?;
        let (meta, label) = named(&namespace, key, whole(&plan))?;
        let put = self.call(py, |client| client.save_labelled(&plan, &[(meta, 0)], &[label])?.remove(0))?;
        Ok(put == Put::Stored)
    }

    /// Fills one buffer and waits for it. Returns false if the block is not there; then the buffer may have been written to.
    fn get(&self, py: Python<'_>, namespace: &[u8], key: &[u8], buffer: Bound<'_, PyAny>) -> PyResult<bool> {
        let (namespace, buffers) = (bytes::namespace(namespace)?, Buffers::open(&[buffer], true)?);
        let plan = buffers.plan()?;
        let (meta, label) = named(&namespace, key, whole(&plan))?;
        let class = self.inner()?.job_options.class;
        self.call(py, |client| client.load_labelled(&plan, &[(meta.key, 0)], &[label], class)?.remove(0))
    }

    fn boot(&self) -> PyResult<u64> {
        Ok(self.inner()?.options.counts.boot.load(Ordering::Relaxed))
    }

    fn counters(&self) -> PyResult<BTreeMap<String, u64>> {
        Ok(self.inner()?.counters())
    }

    /// Why blocks of a GPU do not go straight to and from the host's pool, if they do not.
    fn unregistered(&self) -> PyResult<Option<String>> {
        Ok(self.inner()?.options.counts.unregistered.get().cloned())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner()?;
        py.detach(|| inner.close());
        Ok(())
    }
}

/// A drained job: its number, whether all went well, a byte for each block, bytes copied, why not.
type Ended<'py> = (u64, bool, Bound<'py, PyBytes>, u64, Option<String>);

impl Core {
    /// Fails in a child of the process that made it.
    fn inner(&self) -> PyResult<&Arc<Inner>> {
        let Some(inner) = self.inner.as_ref().filter(|inner| inner.is_ours()) else {
            let text = "this was made before the process forked; make another Core in the child";
            return Err(PyRuntimeError::new_err(text));
        };
        Ok(inner)
    }

    /// Fails if it is closed.
    fn open(&self) -> PyResult<&Arc<Inner>> {
        let inner = self.inner()?;
        if inner.closed.load(Ordering::Relaxed) { Err(Error::new_err("it was closed")) } else { Ok(inner) }
    }

    /// A call that may take as long as a load.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Client) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        let inner = self.open()?;
        let limit = inner.job_options.load_time;
        py.detach(|| {
            let until = std::time::Instant::now() + limit;
            let client = inner.calls.client_within(limit)?;
            client.set_deadline(Some(until));
            call(&client)
        })
        .map_err(|error| client_error(&error))
    }

    fn transfer(
        &self,
        py: Python<'_>,
        saves: bool,
        job: u64,
        (plan, stream): (u64, u64),
        (hashes, hash_bytes): (&[u8], usize),
        blocks: &[u8],
    ) -> PyResult<()> {
        let inner = self.open()?;
        let hashes = bytes::hashes(hashes, hash_bytes)?;
        let blocks: Vec<usize> = bytes::blocks(blocks, hashes.len())?.collect();
        let (planned, namespace) = inner.table.planned(plan)?;
        let (memory, blocks) = py.detach(|| {
            let of = |block| planned.block_bytes(block);
            let blocks = Blocks::of(saves, &namespace, of, blocks.into_iter().zip(hashes))?;
            // This comes last, when all else is known to make sense.
            Ok::<_, PyErr>((planned.for_job(stream)?, blocks))
        })?;
        inner.give(job, Kept::Plan(plan), memory, blocks)
    }

    fn transfer_buffers(
        &self,
        saves: bool,
        job: u64,
        namespace: &[u8],
        keys: &[Vec<u8>],
        buffers: &[Bound<'_, PyAny>],
    ) -> PyResult<()> {
        let inner = self.open()?;
        let namespace = bytes::namespace(namespace)?;
        if keys.len() != buffers.len() {
            let text = format!("{} keys for {} buffers", keys.len(), buffers.len());
            return Err(PyValueError::new_err(text));
        }
        let buffers = Buffers::open(buffers, !saves)?;
        let plan = buffers.plan()?;
        let keys = keys.iter().map(Vec::as_slice).enumerate();
        let blocks = Blocks::of(saves, &namespace, |block| plan.block_bytes(block), keys)?;
        inner.give(job, Kept::Buffers(buffers), (&plan).into(), blocks)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if inner.is_ours() {
            inner.close();
        } else {
            // Its threads are not in this process, so there is nothing to wait for, and their locks may be locked for ever.
            std::mem::forget(inner);
        }
    }
}

/// How many of `keys` are there before the first that is not.
fn leading(client: &Client, keys: &[BlockKey]) -> Result<usize, ClientError> {
    let mut run = 0;
    for keys in keys.chunks(KEYS_MAX) {
        let here = client.exists(keys)?.iter().take_while(|&&here| here).count();
        run += here;
        if here < keys.len() {
            break;
        }
    }
    Ok(run)
}

fn in_batches<T>(
    keys: &[BlockKey],
    call: impl Fn(&[BlockKey]) -> Result<Vec<T>, ClientError>,
) -> Result<Vec<T>, ClientError> {
    let mut all = Vec::with_capacity(keys.len());
    for keys in keys.chunks(KEYS_MAX) {
        all.extend(call(keys)?);
    }
    Ok(all)
}

fn flags<'py>(py: Python<'py>, flags: &[bool]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &flags.iter().map(|&flag| u8::from(flag)).collect::<Vec<_>>())
}
