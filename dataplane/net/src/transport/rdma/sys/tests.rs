//! Our declarations against the system's header: a small C program prints what its compiler sees.

use super::*;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

/// A C expression and what we declared for it.
type Row = (&'static str, usize);

macro_rules! offsets {
    ($c:literal, $rust:ident { $($field:ident $(= $c_field:literal)?),+ $(,)? }) => {
        vec![$((offsets!(@text $c, $field $($c_field)?), offset_of!($rust, $field))),+]
    };
    (@text $c:literal, $field:ident) => { concat!("offsetof(", $c, ", ", stringify!($field), ")") };
    (@text $c:literal, $field:ident $c_field:literal) => { concat!("offsetof(", $c, ", ", $c_field, ")") };
}

/// Structures that we allocate must have the library's size.
fn sizes() -> Vec<Row> {
    vec![
        ("sizeof(struct ibv_context_ops)", size_of::<ContextOps>()),
        ("sizeof(struct ibv_device_attr)", size_of::<DeviceAttr>()),
        ("sizeof(struct ibv_port_attr)", size_of::<PortAttr>()),
        ("sizeof(struct ibv_gid_entry)", size_of::<GidEntry>()),
        ("sizeof(struct ibv_global_route)", size_of::<GlobalRoute>()),
        ("sizeof(struct ibv_ah_attr)", size_of::<AhAttr>()),
        ("sizeof(struct ibv_qp_cap)", size_of::<QpCap>()),
        ("sizeof(struct ibv_qp_init_attr)", size_of::<QpInitAttr>()),
        ("sizeof(struct ibv_qp_attr)", size_of::<QpAttr>()),
        ("sizeof(struct ibv_sge)", size_of::<Sge>()),
        ("sizeof(struct ibv_send_wr)", size_of::<SendWr>()),
        ("sizeof(struct ibv_wc)", size_of::<Wc>()),
        ("sizeof(struct ibv_mr)", size_of::<Mr>()),
        ("sizeof(struct ibv_comp_channel)", size_of::<CompChannel>()),
    ]
}

fn all_offsets() -> Vec<Row> {
    [
        offsets!("struct ibv_context", Context { device, ops, cmd_fd, async_fd, num_comp_vectors }),
        offsets!("struct ibv_context_ops", ContextOps { poll_cq, req_notify_cq, post_send }),
        offsets!("struct ibv_pd", Pd { context, handle }),
        offsets!("struct ibv_mr", Mr { context, pd, addr, length, handle, lkey, rkey }),
        offsets!("struct ibv_comp_channel", CompChannel { context, fd, refcnt }),
        offsets!("struct ibv_cq", Cq { context, channel, cq_context, handle, cqe }),
        offsets!("struct ibv_qp", Qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num }),
        offsets!(
            "struct ibv_device_attr",
            DeviceAttr {
                fw_ver,
                node_guid,
                sys_image_guid,
                max_mr_size,
                page_size_cap,
                vendor_id,
                vendor_part_id,
                hw_ver,
                max_qp,
                max_qp_wr,
                device_cap_flags,
                max_sge,
                max_sge_rd,
                max_cq,
                max_cqe,
                max_mr,
                max_pd,
                max_qp_rd_atom,
                max_ee_rd_atom,
                max_res_rd_atom,
                max_qp_init_rd_atom,
                max_pkeys,
                local_ca_ack_delay,
                phys_port_cnt
            }
        ),
        offsets!(
            "struct ibv_port_attr",
            PortAttr {
                state,
                max_mtu,
                active_mtu,
                gid_tbl_len,
                port_cap_flags,
                max_msg_sz,
                bad_pkey_cntr,
                qkey_viol_cntr,
                pkey_tbl_len,
                lid,
                sm_lid,
                lmc,
                max_vl_num,
                sm_sl,
                subnet_timeout,
                init_type_reply,
                active_width,
                active_speed,
                phys_state,
                link_layer,
                flags,
                port_cap_flags2
            }
        ),
        offsets!("struct ibv_gid_entry", GidEntry { gid, gid_index, port_num, gid_type, ndev_ifindex }),
        offsets!(
            "struct ibv_global_route",
            GlobalRoute { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ),
        offsets!(
            "struct ibv_ah_attr",
            AhAttr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ),
        offsets!(
            "struct ibv_qp_cap",
            QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ),
        offsets!(
            "struct ibv_qp_init_attr",
            QpInitAttr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ),
        offsets!(
            "struct ibv_qp_attr",
            QpAttr {
                qp_state,
                cur_qp_state,
                path_mtu,
                path_mig_state,
                qkey,
                rq_psn,
                sq_psn,
                dest_qp_num,
                qp_access_flags,
                cap,
                ah_attr,
                alt_ah_attr,
                pkey_index,
                alt_pkey_index,
                en_sqd_async_notify,
                sq_draining,
                max_rd_atomic,
                max_dest_rd_atomic,
                min_rnr_timer,
                port_num,
                timeout,
                retry_cnt,
                rnr_retry,
                alt_port_num,
                alt_timeout,
                rate_limit
            }
        ),
        offsets!("struct ibv_sge", Sge { addr, length, lkey }),
        offsets!(
            "struct ibv_send_wr",
            SendWr {
                wr_id,
                next,
                sg_list,
                num_sge,
                opcode,
                send_flags,
                imm_data,
                remote_addr = "wr.rdma.remote_addr",
                rkey = "wr.rdma.rkey",
            }
        ),
        offsets!(
            "struct ibv_wc",
            Wc {
                wr_id,
                status,
                opcode,
                vendor_err,
                byte_len,
                imm_data,
                qp_num,
                src_qp,
                wc_flags,
                pkey_index,
                slid,
                sl,
                dlid_path_bits
            }
        ),
    ]
    .concat()
}

macro_rules! constants {
    ($($name:ident),+ $(,)?) => { vec![$((concat!("IBV_", stringify!($name)), $name as usize)),+] };
}

fn all_constants() -> Vec<Row> {
    constants![
        PORT_ACTIVE,
        LINK_LAYER_ETHERNET,
        GID_TYPE_IB,
        GID_TYPE_ROCE_V1,
        GID_TYPE_ROCE_V2,
        ACCESS_LOCAL_WRITE,
        ACCESS_REMOTE_WRITE,
        ACCESS_REMOTE_READ,
        QPT_RC,
        QPS_INIT,
        QPS_RTR,
        QPS_RTS,
        QPS_ERR,
        QP_STATE,
        QP_ACCESS_FLAGS,
        QP_PKEY_INDEX,
        QP_PORT,
        QP_AV,
        QP_PATH_MTU,
        QP_TIMEOUT,
        QP_RETRY_CNT,
        QP_RNR_RETRY,
        QP_RQ_PSN,
        QP_MAX_QP_RD_ATOMIC,
        QP_MIN_RNR_TIMER,
        QP_SQ_PSN,
        QP_MAX_DEST_RD_ATOMIC,
        QP_DEST_QPN,
        WR_RDMA_WRITE,
        WR_RDMA_READ,
        SEND_SIGNALED,
        SEND_INLINE,
        WC_SUCCESS,
        WC_LOC_PROT_ERR,
        WC_WR_FLUSH_ERR,
        WC_REM_INV_REQ_ERR,
        WC_REM_ACCESS_ERR,
        WC_REM_OP_ERR,
        WC_RETRY_EXC_ERR,
        WC_RNR_RETRY_EXC_ERR,
    ]
}

/// The C compiler's answers, one number per row, or `None` without the header or a compiler.
fn system_values(rows: &[Row]) -> Option<Vec<usize>> {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("abi.c"), folder.path().join("abi"));
    let prints: String =
        rows.iter().map(|(text, _)| format!("    printf(\"%zu\\n\", (size_t)({text}));\n")).collect();
    let text = format!(
        "#include <infiniband/verbs.h>\n#include <stdio.h>\nint main(void) {{\n{prints}    return 0;\n}}\n"
    );
    std::fs::write(&source, text).unwrap();
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&program).output().ok()?;
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().unwrap();
    Some(String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect())
}

#[test]
fn declarations_equal_the_system_header() {
    let rows = [sizes(), all_offsets(), all_constants()].concat();
    let Some(values) = system_values(&rows) else {
        eprintln!("skipped: infiniband/verbs.h (package libibverbs-dev) or a C compiler is not installed");
        return;
    };
    assert_eq!(values.len(), rows.len());
    for ((text, ours), theirs) in rows.iter().zip(values) {
        assert_eq!(*ours, theirs, "{text}");
    }
}
