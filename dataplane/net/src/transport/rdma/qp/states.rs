//! Creating a queue pair, and the states it goes through: INIT, ready to receive, ready to send, error.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::{Queue, QueueAddress, QueueOptions, RETRIES_MAX};
use crate::transport::rdma::Error;
use crate::transport::rdma::cq::CompletionQueue;
use crate::transport::rdma::device::Device;
use crate::transport::rdma::load::check;
use crate::transport::rdma::sys;

impl Queue {
    pub(super) fn break_off(&mut self) {
        self.ready = false;
        let attr = sys::QpAttr { qp_state: sys::QPS_ERR, ..Default::default() };
        // If even this fails, the device is gone, and `close` returns what is in flight.
        let _ = self.modify(attr, sys::QP_STATE, "breaking off a connection");
    }

    pub(super) fn destroy(&mut self) {
        self.ready = false;
        if let Some(qp) = self.qp.take() {
            // SAFETY: open until here, and never used again.
            unsafe { (self.device.verbs.destroy_qp)(qp.as_ptr()) };
        }
    }

    pub(super) fn to_init(&self) -> Result<(), Error> {
        let attr = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            port_num: self.device.options().port,
            qp_access_flags: (sys::ACCESS_REMOTE_READ | sys::ACCESS_REMOTE_WRITE) as u32,
            ..Default::default()
        };
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        self.modify(attr, mask, "preparing a queue pair")
    }

    pub(super) fn to_receive(&self, ours: &QueueAddress, peer: &QueueAddress) -> Result<(), Error> {
        /// The wait asked of a sender that finds no receive buffer, 0.64 ms; one-sided operations need no buffer.
        const RNR_TIMER: u8 = 12;
        let attr = sys::QpAttr {
            qp_state: sys::QPS_RTR,
            path_mtu: u32::from(ours.mtu.min(peer.mtu)),
            dest_qp_num: peer.number,
            rq_psn: peer.sequence,
            max_dest_rd_atomic: ours.reads_in,
            min_rnr_timer: RNR_TIMER,
            ah_attr: self.route(peer)?,
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER;
        self.modify(attr, mask, "connecting a queue pair (ready to receive)")
    }

    pub(super) fn to_send(
        &self,
        options: &QueueOptions,
        sequence: u32,
        peer: &QueueAddress,
    ) -> Result<(), Error> {
        let attr = sys::QpAttr {
            qp_state: sys::QPS_RTS,
            sq_psn: sequence,
            timeout: options.ack_timeout.min(31),
            retry_cnt: options.retries.min(RETRIES_MAX),
            rnr_retry: options.retries.min(RETRIES_MAX),
            max_rd_atomic: self.device.limits().reads_out.min(peer.reads_in),
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_SQ_PSN
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY
            | sys::QP_MAX_QP_RD_ATOMIC;
        self.modify(attr, mask, "connecting a queue pair (ready to send)")
    }

    /// By GID on Ethernet, where it is the IP address; by LID within an InfiniBand subnet.
    fn route(&self, peer: &QueueAddress) -> Result<sys::AhAttr, Error> {
        /// Hops of the IP header.
        const HOPS: u8 = 64;
        let options = self.device.options();
        let ethernet = self.device.active_port()?.link_layer == sys::LINK_LAYER_ETHERNET;
        let grh = sys::GlobalRoute {
            dgid: peer.gid,
            flow_label: 0,
            // Tables have at most 255 entries that an address handle can name.
            sgid_index: self.device.gid_index()? as u8,
            hop_limit: HOPS,
            traffic_class: options.traffic_class,
        };
        Ok(sys::AhAttr {
            grh,
            dlid: peer.lid,
            sl: options.service_level,
            is_global: u8::from(ethernet),
            port_num: options.port,
            ..Default::default()
        })
    }

    fn modify(&self, mut attr: sys::QpAttr, mask: i32, step: &'static str) -> Result<(), Error> {
        let qp = self.qp.ok_or(Error::Broken)?;
        // SAFETY: the queue pair is open, and the attributes outlive the call.
        check(unsafe { (self.device.verbs.modify_qp)(qp.as_ptr(), &mut attr, mask) })
            .map_err(self.device.failed(step))
    }
}

/// Creates a queue pair, without inline data if the device has none; returns how much it has.
pub(super) fn create(
    device: &Arc<Device>,
    cq: &CompletionQueue,
    options: &QueueOptions,
) -> Result<(NonNull<sys::Qp>, u32), Error> {
    let mut last = io::Error::from(io::ErrorKind::InvalidInput);
    for inline_bytes in [options.inline_bytes, 0] {
        let mut attr = sys::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: ptr::null_mut(),
            cap: sys::QpCap {
                max_send_wr: options.depth,
                max_recv_wr: 1,
                max_send_sge: options.pieces,
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            },
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue are open; the attributes outlive the call.
        let qp = unsafe { (device.verbs.create_qp)(device.pd.as_ptr(), &mut attr) };
        match NonNull::new(qp) {
            Some(qp) => return Ok((qp, inline_bytes)),
            None => last = io::Error::last_os_error(),
        }
    }
    Err(device.failed("creating a queue pair")(last))
}
