//! Plans of an engine's memory, on the host or on a GPU.

use std::sync::Arc;

use kvasir_client::data::{Device, DeviceBlocks, DevicePlan, DevicePlanError, JobMemory, Plan, Run};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::Error;
use crate::memory;

/// Where the blocks of a plan lie.
#[derive(Clone)]
pub(crate) enum Place {
    Host(Arc<Plan>),
    Device(Arc<DevicePlan>),
}

impl Place {
    /// `device` is the driver's number of the GPU, as PyTorch counts them; `None` is the host.
    pub(crate) fn new(device: Option<usize>, runs: &[Run], blocks: usize) -> PyResult<Self> {
        let Some(device) = device else { return memory::plan(runs, blocks).map(Self::Host) };
        let device = Device::of_ordinal(device).map_err(|error| Error::new_err(error.to_string()))?;
        let plan = memory::device_plan(&device, runs, blocks).map_err(|error| match error {
            DevicePlanError::Plan(error) => PyValueError::new_err(error.to_string()),
            DevicePlanError::Cuda(error) => Error::new_err(error.to_string()),
        })?;
        Ok(Self::Device(Arc::new(plan)))
    }

    /// The plan, if it is one of the host's memory. Prompts are handed over only from and to that.
    pub(crate) fn on_host(self) -> PyResult<Arc<Plan>> {
        match self {
            Self::Host(plan) => Ok(plan),
            Self::Device(_) => Err(PyValueError::new_err(
                "the plan is one of a GPU's memory; prompts are handed over from and to the host's memory only",
            )),
        }
    }

    /// Bytes of a block. Returns `None` if there is no such block.
    pub(crate) fn block_bytes(&self, block: usize) -> Option<u32> {
        match self {
            Self::Host(plan) => plan.block_bytes(block),
            Self::Device(plan) => plan.block_bytes(block),
        }
    }

    /// The memory of a job. On a GPU its blocks are touched when what was given to `stream` before is done.
    pub(crate) fn for_job(&self, stream: u64) -> PyResult<JobMemory> {
        match self {
            Self::Host(plan) => Ok(plan.into()),
            Self::Device(plan) => {
                let ready = memory::mark(plan, stream).map_err(|error| Error::new_err(error.to_string()))?;
                Ok(DeviceBlocks { plan: Arc::clone(plan), ready: Arc::new(ready) }.into())
            }
        }
    }
}
