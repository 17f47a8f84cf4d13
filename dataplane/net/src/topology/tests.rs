use super::fixture::{self, CLOUD_VM, HGX, TWO_SOCKETS};
use super::matrix::{JSON_BYTES_MAX, Matrix, Overrides, Rails};
use super::model::{Gpu, Link, Machine, Nic, NumaNode, PciPath};
use super::{Change, Error, Topology};
use kvasir_memory::region::Location;
use proptest::prelude::*;

fn topology(text: &str) -> Topology {
    let sysfs = fixture::build(text);
    Topology::probe(sysfs.path(), Overrides::default()).unwrap()
}

/// Such as `mlx5_0 mlx5_1 | eno3`, as in the printed table.
#[track_caller]
fn check(matrix: &Matrix, location: &str, expected: &str) {
    let rails = matrix.rails(location.parse().unwrap()).unwrap();
    let found = format!("{} | {}", rails.preferred.join(" "), rails.secondary.join(" "));
    assert_eq!(found.trim(), expected, "{location}");
}

#[test]
fn on_an_hgx_each_gpu_prefers_the_nic_below_its_switch() {
    let found = topology(HGX);
    let machine = found.machine();
    assert_eq!(machine.gpus.len(), 8, "neither the NVSwitch nor the display controller is a GPU");
    assert_eq!(machine.gpus[0].pci.address(), "0000:1b:00.0");
    assert_eq!((machine.gpus[7].index, machine.gpus[7].numa), (7, Some(1)));
    let (first, ethernet) = (machine.nic("mlx5_0").unwrap(), machine.nic("eno3").unwrap());
    assert_eq!(first.interfaces, ["ibp24s0"]);
    assert_eq!((first.rdma, first.up, first.rate_mbps), (true, true, Some(400_000)));
    assert_eq!((ethernet.rdma, ethernet.up, ethernet.rate_mbps), (false, true, Some(10_000)));
    assert_eq!(machine.nics.len(), 9, "virtual interfaces are no NICs");

    for (gpu, near) in (0..8).map(|i| (Location::Cuda(i), format!("mlx5_{i}"))) {
        let rails = found.matrix().rails(gpu).unwrap();
        assert_eq!(rails.preferred, [near]);
        assert_eq!(rails.secondary.len(), 8);
        assert_eq!(rails.secondary.last().unwrap(), "eno3", "the slow port is the last resort");
    }
    check(found.matrix(), "cpu:0", "mlx5_0 mlx5_1 mlx5_2 mlx5_3 | mlx5_4 mlx5_5 mlx5_6 mlx5_7 eno3");
    check(found.matrix(), "cpu:1", "mlx5_4 mlx5_5 mlx5_6 mlx5_7 | mlx5_0 mlx5_1 mlx5_2 mlx5_3 eno3");
    check(found.matrix(), "cuda:5", "mlx5_5 | mlx5_4 mlx5_6 mlx5_7 mlx5_0 mlx5_1 mlx5_2 mlx5_3 eno3");
}

#[test]
fn on_two_sockets_the_nearest_usable_ports_are_preferred() {
    let found = topology(TWO_SOCKETS);
    let machine = found.machine();
    assert!(machine.nic("mlx5_4").is_none(), "a virtual function is the wire of its physical function");
    assert!(!machine.nic("mlx5_3").unwrap().up);
    assert_eq!(machine.nic("ens6f0np0").unwrap().name, "mlx5_2", "an interface names its NIC");
    let link = |location, nic| machine.link(location, machine.nic(nic).unwrap());
    assert_eq!(link(Location::Cuda(0), "mlx5_0"), Link::SameNode);
    assert_eq!(link(Location::Cuda(0), "mlx5_2"), Link::OtherNode(20));
    assert_eq!(link(Location::Cuda(1), "mlx5_2"), Link::SameRoot);
    check(found.matrix(), "cpu:0", "mlx5_0 mlx5_1 | mlx5_2 eno8303");
    check(found.matrix(), "cpu:1", "mlx5_2 | mlx5_0 mlx5_1 eno8303");
    check(found.matrix(), "cuda:0", "mlx5_0 mlx5_1 | mlx5_2 eno8303");
    check(found.matrix(), "cuda:1", "mlx5_2 | mlx5_0 mlx5_1 eno8303");
}

#[test]
fn a_cloud_vm_uses_what_it_has() {
    let found = topology(CLOUD_VM);
    assert_eq!(found.matrix().to_json(), r#"{"cpu:0":[["eth0"],[]]}"#);
    let nic = found.machine().nic("eth0").unwrap();
    assert_eq!(nic.pci.as_ref().unwrap().address(), "0000:00:03.0");
    assert_eq!((nic.numa, nic.rate_mbps), (Some(0), None));
}

#[test]
fn software_rdma_over_a_virtual_interface_is_a_nic_without_a_place() {
    let found = topology(
        "devices/virtual/net/veth0 operstate=up speed=10000\n\
         devices/virtual/infiniband/rxe0 parent=veth0\n\
         devices/virtual/infiniband/rxe0/ports/1 state=\"4: ACTIVE\" rate=\"2.5 Gb/sec (1X SDR)\"",
    );
    let nic = found.machine().nic("rxe0").unwrap();
    assert_eq!((&nic.pci, nic.rate_mbps, nic.up), (&None, Some(2_500), true));
    check(found.matrix(), "cpu:0", "rxe0 |");
}

#[test]
fn a_folder_that_is_no_sysfs_is_an_error() {
    let empty = tempfile::tempdir().unwrap();
    let probe = |path| Topology::probe(path, Overrides::default());
    assert!(matches!(probe(empty.path()), Err(Error::NotSysfs { .. })));
    assert!(matches!(probe(&empty.path().join("missing")), Err(Error::Read { .. })));
}

#[test]
fn this_machine_can_be_probed() {
    let found = Topology::probe("/sys".as_ref(), Overrides::default()).unwrap();
    assert!(!found.machine().numa.is_empty());
    let printed = found.to_string();
    assert!(found.machine().nics.iter().all(|nic| printed.contains(&nic.name)), "{printed}");
}

#[test]
fn settings_override_the_probe() {
    let sysfs = fixture::build(HGX);
    let with = |json: &str| {
        let overrides = serde_json::from_str::<Overrides>(json).map_err(|error| error.to_string())?;
        let found = Topology::probe(sysfs.path(), overrides).map_err(|error| error.to_string())?;
        Ok::<_, String>(found.matrix().clone())
    };
    let only = with(r#"{"only": ["mlx5_0", "ibp94s0"]}"#).unwrap();
    check(&only, "cpu:0", "mlx5_0 mlx5_3 |");
    check(&only, "cuda:4", "mlx5_0 mlx5_3 |");
    check(&with(r#"{"exclude": ["mlx5_4", "eno3"]}"#).unwrap(), "cuda:4", {
        "mlx5_5 mlx5_6 mlx5_7 | mlx5_0 mlx5_1 mlx5_2 mlx5_3"
    });
    let placed = with(r#"{"locations": {"cuda:0": [["ibp64s0"], ["mlx5_7", "mlx5_2"]]}}"#).unwrap();
    check(&placed, "cuda:0", "mlx5_1 | mlx5_7 mlx5_2");
    check(&placed, "cpu:1", "mlx5_4 mlx5_5 mlx5_6 mlx5_7 | mlx5_0 mlx5_1 mlx5_2 mlx5_3 eno3");

    let refused = |json: &str, expected: &str| {
        let message = with(json).unwrap_err();
        assert!(message.contains(expected), "{json}: {message}");
    };
    refused(r#"{"exclude": ["mlx6_0"]}"#, r#"no NIC is called "mlx6_0" here"#);
    refused(r#"{"exclude": ["mlx6_0"]}"#, "mlx5_0, mlx5_1, mlx5_2");
    refused(r#"{"excluded": []}"#, "unknown field");
    refused(r#"{"locations": {"gpu:0": [[], []]}}"#, "no memory location; write cpu:N or cuda:N");
}

#[test]
fn devices_that_come_and_go_are_noticed() {
    let sysfs = fixture::build(HGX);
    let root = sysfs.path();
    let overrides = Overrides { exclude: vec!["eno3".into()], ..Overrides::default() };
    let mut found = Topology::probe(root, overrides).unwrap();
    let before = found.matrix().clone();
    assert_eq!(found.refresh().unwrap(), []);

    let port =
        "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0/infiniband/mlx5_0/ports/1";
    fixture::add(root, &format!("{port} state=\"1: DOWN\""));
    let down = Change::NicLink { name: "mlx5_0".into(), up: false, rate_mbps: Some(400_000) };
    assert_eq!(found.refresh().unwrap(), [down]);
    check(found.matrix(), "cuda:0", "mlx5_1 mlx5_2 mlx5_3 | mlx5_4 mlx5_5 mlx5_6 mlx5_7");

    fixture::remove(root, "infiniband", "mlx5_0");
    // Its interface is still there, without RDMA and without a link. Even a NIC that the settings name may go.
    fixture::remove(root, "net", "eno3");
    let gone = ["mlx5_0", "eno3"].map(|name| Change::NicRemoved(name.into()));
    let changes = found.refresh().unwrap();
    assert!(gone.iter().all(|change| changes.contains(change)), "{changes:?}");
    assert!(changes.contains(&Change::NicAdded("ibp24s0".into())), "{changes:?}");

    fixture::add(root, &format!("{port} state=\"4: ACTIVE\" rate=\"400 Gb/sec (4X NDR)\""));
    assert!(found.refresh().unwrap().contains(&Change::NicAdded("mlx5_0".into())));
    assert_eq!(*found.matrix(), before);

    std::fs::remove_file(root.join("bus/pci/devices/0000:df:00.0")).unwrap();
    assert_eq!(found.refresh().unwrap(), [Change::Locations]);
    assert!(found.matrix().rails(Location::Cuda(7)).is_none());
}

/// Four NUMA nodes on two sockets, and one NIC on each socket: a node without a NIC takes the one on its socket.
#[test]
fn numa_distance_decides_between_remote_nodes() {
    let node =
        |id: u16, distances: [u32; 4]| NumaNode { id, cpus: String::new(), distances: distances.into() };
    let nic = |name: &str, numa| Nic {
        name: name.into(),
        rdma: true,
        interfaces: Vec::new(),
        pci: None,
        numa: Some(numa),
        rate_mbps: None,
        up: true,
    };
    let pci = PciPath::new(vec!["pci0000:01".into(), "0000:01:00.0".into()]).unwrap();
    let machine = Machine {
        numa: vec![
            node(0, [10, 12, 32, 32]),
            node(1, [12, 10, 32, 32]),
            node(2, [32, 32, 10, 12]),
            node(3, [32, 32, 12, 10]),
        ],
        gpus: vec![Gpu { index: 0, device: None, pci, numa: Some(3) }],
        nics: vec![nic("a", 1), nic("b", 2)],
    };
    let matrix = Matrix::of(&machine, &Overrides::default());
    check(&matrix, "cpu:0", "a | b");
    check(&matrix, "cpu:1", "a | b");
    check(&matrix, "cpu:3", "b | a");
    check(&matrix, "cuda:0", "b | a");
}

#[test]
fn a_nic_costs_what_its_place_says() {
    let hgx = topology(HGX);
    let cost = |location: &str, nic| hgx.matrix().nic_cost(location.parse().unwrap(), nic);
    assert_eq!((cost("cuda:2", "mlx5_2"), cost("cuda:2", "mlx5_5")), (Some(0), Some(1)), "its own first");
    assert_eq!(
        (cost("cpu:9", "mlx5_5"), cost("cuda:2", "mlx5_99")),
        (Some(0), None),
        "unknown places use all"
    );
}

#[test]
fn matrices_that_make_no_sense_are_refused() {
    let refused = |json: &str, expected: &str| {
        let message = Matrix::from_json(json.as_bytes()).unwrap_err().to_string();
        assert!(message.contains(expected), "{json:.80}: {message}");
    };
    refused("[]", "invalid type");
    refused(r#"{"cpu:0": [["a"]]}"#, "invalid length 1");
    refused(r#"{"cpu:-1": [["a"], []]}"#, "no memory location");
    refused(r#"{"cpu:+1": [["a"], []]}"#, "no memory location");
    refused(r#"{"cpu:0": [["a"], ["a"]]}"#, "there twice");
    refused(r#"{"cpu:0": [["a b"], []]}"#, "not a device name");
    refused(r#"{"cpu:0": [[""], []]}"#, "not a device name");
    refused(&format!(r#"{{"cpu:0": [["{}"], []]}}"#, "x".repeat(65)), "not a device name");
    let many: Vec<_> = (0..300).map(|i| format!("\"n{i}\"")).collect();
    refused(&format!(r#"{{"cpu:0": [[{}], []]}}"#, many.join(",")), "300 NICs for a location");
    let many: Vec<_> = (0..2000).map(|i| format!("\"cpu:{i}\": [[], []]")).collect();
    refused(&format!("{{{}}}", many.join(",")), "2000 locations");
    refused(&" ".repeat(JSON_BYTES_MAX + 1), "longer than");
}

proptest! {
    #[test]
    fn a_matrix_survives_its_journey(
        table in prop::collection::btree_map((any::<bool>(), 0u16..99), (0usize..5, 0usize..5), 0..9)
    ) {
        let name = |i: usize| format!("mlx5_{i}");
        let json: serde_json::Map<_, _> = table
            .into_iter()
            .map(|((gpu, n), (preferred, secondary))| {
                let location = if gpu { Location::Cuda(n) } else { Location::Cpu(n) };
                let rails = Rails {
                    preferred: (0..preferred).map(name).collect(),
                    secondary: (preferred..preferred + secondary).map(name).collect(),
                };
                (location.to_string(), serde_json::to_value(rails).unwrap())
            })
            .collect();
        let matrix = Matrix::from_json(serde_json::to_string(&json).unwrap().as_bytes()).unwrap();
        prop_assert_eq!(matrix.iter().count(), json.len());
        prop_assert_eq!(&Matrix::from_json(matrix.to_json().as_bytes()).unwrap(), &matrix);
    }

    #[test]
    fn no_json_panics(cut in 0usize..200, at in 0usize..200, byte in any::<u8>()) {
        let mut json = br#"{"cpu:0":[["mlx5_0"],["mlx5_1"]],"cuda:0":[["mlx5_1"],["mlx5_0"]]}"#.to_vec();
        let at = at % json.len();
        json[at] = byte;
        json.truncate(cut);
        let _ = Matrix::from_json(&json);
    }
}
