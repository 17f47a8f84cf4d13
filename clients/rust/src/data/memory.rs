//! The memory of a job's blocks: the host's, or a GPU's.

use std::sync::Arc;

use kvasir_memory::runs::Plan;
use kvasir_os::time::Instant;
use kvasir_protocol::block::{BlockKey, BlockMeta};

#[cfg(feature = "gpu")]
use super::device::DeviceBlocks;
#[cfg(feature = "gpu")]
pub(super) use super::device::{Hands, Pools};
use super::{Client, ClientError, Label, Put};

/// Where the blocks of a job lie.
#[derive(Clone, Debug)]
pub enum JobMemory {
    Host(Arc<Plan>),
    #[cfg(feature = "gpu")]
    Device(DeviceBlocks),
}

impl From<&Arc<Plan>> for JobMemory {
    fn from(plan: &Arc<Plan>) -> Self {
        Self::Host(Arc::clone(plan))
    }
}

impl JobMemory {
    /// How many blocks there are.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Host(plan) => plan.blocks(),
            #[cfg(feature = "gpu")]
            Self::Device(blocks) => blocks.plan.blocks(),
        }
    }

    /// Bytes of a block. Returns `None` if there is no such block.
    pub fn block_bytes(&self, block: usize) -> Option<u32> {
        match self {
            Self::Host(plan) => plan.block_bytes(block),
            #[cfg(feature = "gpu")]
            Self::Device(blocks) => blocks.plan.block_bytes(block),
        }
    }

    /// Returns when the engine is done with the blocks, or `is_closed` says that nobody wants them any more.
    ///
    /// # Errors
    /// The engine is not done with them by `until`, or its GPU has failed.
    #[cfg_attr(
        not(feature = "gpu"),
        expect(unused_variables, reason = "an engine on the host is done with them")
    )]
    pub(super) fn wait_until_ready(
        &self,
        until: Instant,
        is_closed: impl Fn() -> bool,
    ) -> Result<(), ClientError> {
        match self {
            Self::Host(_) => Ok(()),
            #[cfg(feature = "gpu")]
            Self::Device(blocks) => blocks.wait_until_ready(until, is_closed),
        }
    }

    #[cfg_attr(not(feature = "gpu"), expect(unused_variables, reason = "for a GPU alone"))]
    pub(super) fn load(
        &self,
        hands: &mut Hands,
        client: &Client,
        blocks: &[(BlockKey, usize)],
        labels: &[Label],
        class: u16,
    ) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        match self {
            Self::Host(plan) => client.load_labelled(plan, blocks, labels, class),
            #[cfg(feature = "gpu")]
            Self::Device(DeviceBlocks { plan, .. }) => hands.load(client, plan, blocks, labels, class),
        }
    }

    #[cfg_attr(not(feature = "gpu"), expect(unused_variables, reason = "for a GPU alone"))]
    pub(super) fn save(
        &self,
        hands: &mut Hands,
        client: &Client,
        blocks: &[(BlockMeta, usize)],
        labels: &[Label],
    ) -> Result<Vec<Result<Put, ClientError>>, ClientError> {
        match self {
            Self::Host(plan) => client.save_labelled(plan, blocks, labels),
            #[cfg(feature = "gpu")]
            Self::Device(DeviceBlocks { plan, .. }) => hands.save(client, plan, blocks, labels),
        }
    }
}

/// What a thread needs to copy: nothing, where all memory is the host's.
#[cfg(not(feature = "gpu"))]
pub(super) struct Hands;

#[cfg(not(feature = "gpu"))]
impl Hands {
    pub(super) fn of(_: &Arc<Pools>) -> Self {
        Self
    }
}

/// Pools that drivers of GPUs know: none.
#[cfg(not(feature = "gpu"))]
pub(super) struct Pools;

#[cfg(not(feature = "gpu"))]
impl Pools {
    pub(super) fn new(_: &Arc<super::options::Counts>) -> Self {
        Self
    }

    pub(super) fn close(&self) {}
}
