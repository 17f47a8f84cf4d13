use super::*;

fn load(file: Option<&str>, environment: &[(&str, &str)], set: &[&str]) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvasir.toml");
    if let Some(text) = file {
        std::fs::write(&path, text).unwrap();
    }
    let environment = environment.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    let set: Vec<_> = set.iter().map(|s| s.to_string()).collect();
    let loaded = Config::load(file.map(|_| path.as_path()), environment, &set);
    loaded.map_err(|e| e.to_string().replace(&path.display().to_string(), "FILE"))
}

#[test]
fn a_relative_data_folder_stands_for_one_below_where_the_host_starts() {
    let config = Config::load(None, [], &["node.data_dir=here".to_owned()]).unwrap();
    assert_eq!(config.node.data_dir, std::env::current_dir().unwrap().join("here"));
    assert_eq!(config.node.socket, config.node.data_dir.join("kvasir.sock"));
}

#[test]
fn no_file_is_needed() {
    let config = load(None, &[], &[]).unwrap();
    assert_eq!((config.listen.grpc.0, config.listen.data.0), (None, None));
    assert!(!config.node.name.is_empty());
    assert_eq!(config.node.socket, config.node.data_dir.join("kvasir.sock"));
}

#[test]
fn later_layers_win() {
    let file = "[store]\npool_bytes = \"8GiB\"\nlow_free = 0\nput_wait = \"1s\"\n[listen]\n";
    let environment =
        [("KVASIR__STORE__PUT_WAIT", "2s"), ("KVASIR__STORE__LEASES_MAX", "7"), ("PATH", "/bin")];
    let config = load(Some(file), &environment, &["store.put_wait=3s", "store.high_free = 0.5"]).unwrap();
    assert_eq!(config.store.pool_bytes, Size(8 << 30));
    assert_eq!(config.store.low_free, 0.0);
    assert_eq!(config.store.leases_max, 7);
    assert_eq!(config.store.put_wait, Span::secs(3));
    assert_eq!(config.store.high_free, 0.5);
}

#[test]
fn policies_take_their_own_settings() {
    let file =
        "[policy.evictor]\nsource = \"lru\"\n[policy.scheduler.settings]\na = 1\nb = true\nc = \"x\"\n";
    let config = load(
        Some(file),
        &[("KVASIR__POLICY__SCHEDULER__SETTINGS__D", "4")],
        &["policy.evictor.settings.e=5"],
    );
    let policy = config.unwrap().policy;
    assert_eq!(policy.evictor.source, "lru");
    let settings =
        |a: &Assigned| a.settings.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" ");
    assert_eq!(settings(&policy.scheduler), "a=1 b=true c=x d=4");
    assert_eq!(settings(&policy.evictor), "e=5");
}

#[test]
fn tenants_have_quotas_and_floors() {
    let file = "[[store.tenants]]\ntenant = 1\nquota_bytes = \"1MiB\"\nfloor_bytes = \"1KiB\"\n[[store.tenants]]\ntenant = 2\nweight = 3\n";
    let tenants = load(Some(file), &[], &[]).unwrap().store.tenants;
    assert_eq!((tenants[0].quota_bytes, tenants[0].floor_bytes), (Some(Size(1 << 20)), Some(Size(1 << 10))));
    assert_eq!((tenants[1].tenant, tenants[1].weight), (2, Some(3)));
    let check = |text: &str, expected: &str| {
        let error = load(None, &[("KVASIR__STORE__TENANTS", text)], &[]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    check("[{tenant = 1, weight = 1, floor_bytes = \"1KiB\"}]", "give one of them");
    check("[{tenant = 1, quota = 1}]", "unknown field `quota`");
    check("[{tenant = 1}, {tenant = 1}]", "listed twice");
    check("many", "expected a sequence");
}

#[test]
fn what_is_printed_reads_back() {
    let tenants = "store.tenants=[{tenant = 1, quota_bytes = \"1MiB\"}]";
    let config = load(None, &[], &["store.pool_bytes=3MiB", "policy.evictor.settings.x=y", tenants]).unwrap();
    let again = load(Some(&config.to_toml()), &[], &[]).unwrap();
    assert_eq!(config, again);
}

#[test]
fn bad_forms_say_what_and_where() {
    let check = |file: Option<&str>, environment: &[(&str, &str)], set: &[&str], expected: &[&str]| {
        let message = load(file, environment, set).expect_err(expected[0]);
        for part in expected {
            assert!(message.contains(part), "`{message}` lacks `{part}`");
        }
    };
    check(Some("[store\n"), &[], &[], &["FILE is not valid TOML", "line 1"]);
    check(Some("[stor]\nx = 1\n"), &[], &[], &["FILE: unknown key `stor.x`", "did you mean `store`?"]);
    check(
        Some("[stor]\n"),
        &[],
        &[],
        &["FILE: unknown key `stor`", "sections: access, cluster, conductor, listen"],
    );
    check(Some("store = 3\n"), &[], &[], &["`store` cannot be 3: it is a section"]);
    check(
        Some("[store]\npool_byte = \"1GiB\"\n"),
        &[],
        &[],
        &["FILE: unknown key `store.pool_byte`", "did you mean `pool_bytes`?"],
    );
    check(
        Some("[store]\npool_bytes = \"lots\"\n"),
        &[],
        &[],
        &["FILE", "`store.pool_bytes` cannot be \"lots\"", "8GiB"],
    );
    check(
        Some("[store]\npool_bytes = 5\n"),
        &[],
        &[],
        &["`store.pool_bytes` cannot be 5", "expected a string"],
    );
    check(
        None,
        &[("KVASIR__STORE__PUTWAIT", "1s")],
        &[],
        &["variable KVASIR__STORE__PUTWAIT", "did you mean `put_wait`?"],
    );
    check(None, &[("KVASIR__STORE__LEASES_MAX", "-1")], &[], &["KVASIR__STORE__LEASES_MAX", "cannot be -1"]);
    check(None, &[], &["store.lease_ttl=soon"], &["--set store.lease_ttl=soon", "`soon` is not a time"]);
    check(None, &[], &["store"], &["--set store", "section.key=value"]);
    check(None, &[], &["store=1"], &["it is a section"]);
    check(None, &[], &["listen.allow_remote=perhaps"], &["expected a boolean"]);
    check(None, &[], &["store.checksum=maybe"], &["unknown variant `maybe`", "`trust`"]);
    check(None, &[], &["store.pool_bytes=0B"], &["`store.pool_bytes` = 0B must be at least 1"]);
    check(
        None,
        &[],
        &["store.block_slots=4000000000"],
        &["`store.block_slots` = 4000000000 must be 1 to 200000000"],
    );
    check(None, &[], &["tiering.queue_bytes=0B"], &["`tiering.queue_bytes` = 0 must be at least 1"]);
    check(None, &[], &["tiering.offload=some"], &["unknown variant `some`", "`policy`"]);
    check(None, &[], &["tiering.load_timeout=0s"], &["`tiering.load_timeout` = 0s must be more than"]);
    check(
        None,
        &[],
        &["nvme.segment_bytes=5KiB"],
        &["`nvme.segment_bytes` = 5KiB must be a multiple of 4KiB"],
    );
    check(
        None,
        &[],
        &["nvme.capacity_bytes=1MiB"],
        &["`nvme.capacity_bytes` = 1MiB must hold at least seven"],
    );
    check(None, &[], &["remote.url=ftp://x/y"], &["`remote.url` = ftp://x/y must be s3://bucket/prefix"]);
    check(None, &[], &["remote.endpoint=http://x"], &["`remote.endpoint` = http://x needs remote.url"]);
    check(None, &[], &["nvme.directory=/x"], &["unknown key `nvme.directory`", "keys of `nvme`"]);
    check(None, &[], &["store.low_free=0.5"], &["`store.high_free` = 0.1", "store.low_free (0.5)"]);
    check(None, &[], &["store.low_free=nan"], &["`store.low_free` = NaN"]);
    check(
        None,
        &[],
        &["listen.grpc=0.0.0.0:7420"],
        &["`listen.grpc` = 0.0.0.0:7420 is not loopback", "allow_remote"],
    );
    let sealed = ["listen.tls.cert=/c", "listen.tls.key=/k"];
    let open = ["listen.grpc=0.0.0.0:7420", "listen.http=0.0.0.0:7421", "listen.data=0.0.0.0:7422"];
    let set: Vec<String> = open.into_iter().map(str::to_owned).chain(sealed.map(str::to_owned)).collect();
    Config::load(None, [], &set).unwrap();
    check(None, &[], &["listen.http=0.0.0.0:1"], &["`listen.http`", "not loopback"]);
    check(None, &[], &sealed[..1], &["listen.tls", "needs both cert and key"]);
    let two = r#"access.allow=[{user="0", certificate="x", roles=["engine"]}]"#;
    check(None, &[], &[two], &["a user, a group or a certificate"]);
    let unknown = r#"access.allow=[{user="0", roles=["engine"], namespaces=["x"]}]"#;
    check(None, &[], &[unknown], &["x", "[[access.namespaces]]"]);
    let taken = r#"access.namespaces=[{name="a", number=3}]"#;
    let tenant = r#"access.allow=[{user="0", roles=["engine"], tenant=3}]"#;
    check(None, &[], &[taken, tenant], &["a = 3", "number of a tenant"]);
    check(
        None,
        &[],
        &["listen.grpc=127.0.0.1:7420", "listen.http=127.0.0.1:7420"],
        &["`listen.http`", "is taken by listen.grpc"],
    );
    check(None, &[], &["listen.grpc=localhost"], &["--set listen.grpc=localhost", "socket address"]);
    check(None, &[], &["node.name=a b"], &["`node.name` = a b must be"]);
    check(
        None,
        &[],
        &["policy.evictor.source=lur"],
        &["`policy.evictor.source` = lur is no evictor", "did you mean `lru`?"],
    );
    check(None, &[], &["policy.evictr.source=lru"], &["did you mean `evictor`?"]);
    check(None, &[], &["policy.hot_deadline=0s"], &["`policy.hot_deadline` = 0s"]);
    let missing = Config::load(Some("/no/such/kvasir.toml".as_ref()), [], &[]).unwrap_err().to_string();
    assert!(missing.starts_with("cannot read the configuration /no/such/kvasir.toml"), "{missing}");
}

#[test]
fn topology_settings_name_nics_and_places() {
    let file = "[topology]\nonly = [\"mlx5_0\", \"mlx5_1\"]\n[topology.locations]\n\"cuda:0\" = [[\"mlx5_1\"], []]\n";
    let environment = [("KVASIR__TOPOLOGY__EXCLUDE", r#"["eno3", "eno4"]"#)];
    let config = load(Some(file), &environment, &[r#"topology.only=["mlx5_1"]"#]).unwrap();
    assert_eq!(config.topology.only, ["mlx5_1"]);
    assert_eq!(config.topology.exclude, ["eno3", "eno4"]);
    let rails = &config.topology.locations[&"cuda:0".parse().unwrap()];
    assert_eq!((rails.preferred.as_slice(), rails.secondary.len()), (["mlx5_1".to_owned()].as_slice(), 0));
    assert_eq!(load(Some(&config.to_toml()), &[], &[]).unwrap(), config);

    let wrong = load(Some("[topology.locations]\n\"gpu:0\" = [[], []]\n"), &[], &[]).unwrap_err();
    assert!(wrong.starts_with("FILE: `topology.locations.gpu:0` cannot be [[], []]"), "{wrong}");
    assert!(wrong.contains("write cpu:N or cuda:N"), "{wrong}");
    let wrong = load(None, &[], &["topology.exlude=[]"]).unwrap_err();
    assert!(wrong.contains("did you mean `exclude`?"), "{wrong}");
}

#[test]
fn peers_are_checked() {
    let peers = |list: &str| format!("cluster.peers=[{list}]");
    let secret = "cluster.secret_file=/run/secret";
    let good =
        r#"{name = "b", address = "10.0.0.2:7423", rack = "r2"}, {name = "c", address = "c.example:7423"}"#;
    let config = load(None, &[], &[secret, "node.name=a", &peers(good)]).unwrap();
    assert!(config.cluster.is_on() && !Config::default().cluster.is_on());
    assert_eq!((config.cluster.peers[0].rack.as_str(), config.cluster.peers[1].rack.as_str()), ("r2", ""));
    assert_eq!(load(Some(&config.to_toml()), &[], &[]).unwrap(), config);
    let check = |set: &[&str], expected: &[&str]| {
        let all: Vec<_> = ["node.name=a"].iter().chain(set).copied().collect();
        let message = load(None, &[], &all).unwrap_err();
        for part in expected {
            assert!(message.contains(part), "`{message}` lacks `{part}`");
        }
    };
    check(&[&peers(good)], &["cluster.secret_file", "is needed with cluster.peers"]);
    let refused = |list: &str, expected: &[&str]| check(&[secret, &peers(list)], expected);
    refused(r#"{name = "a", address = "b:1"}"#, &["cluster.peers.name", "this host itself"]);
    refused(r#"{name = "b", address = "b:1"}, {name = "b", address = "c:1"}"#, &["listed twice"]);
    refused(r#"{name = "b", address = "b"}"#, &["cluster.peers.address", "`", "write host:port"]);
    refused(r#"{name = "b", address = "b:0"}"#, &["write host:port"]);
    refused(r#"{name = "no name", address = "b:1"}"#, &["cluster.peers.name", "must be 1 to 64"]);
    refused(r#"{name = "b"}"#, &["missing field `address`"]);
    refused(r#"{name = "b", address = "b:1", rock = "x"}"#, &["unknown field `rock`"]);
    check(&[secret, "cluster.name="], &["cluster.name", "must be 1 to 64"]);
    check(&[secret, "cluster.listen=0.0.0.0:1"], &["cluster.listen", "allow_remote"]);
    check(
        &[secret, "cluster.tls.cert=/run/cert.pem", "cluster.tls.ca=/run/ca.pem"],
        &["cluster.tls.key", "go together"],
    );
    check(
        &[secret, "cluster.tls.sert=/run/cert.pem"],
        &["unknown key `cluster.tls.sert`", "did you mean `cert`"],
    );
    let tls = ["cluster.tls.cert=/c", "cluster.tls.key=/k", "cluster.tls.ca=/a", "cluster.listen=0.0.0.0:1"];
    assert!(load(None, &[], &[&[secret], &tls[..]].concat()).unwrap().cluster.tls.is_on());
    let two = [secret, r#"cluster.transfer=["127.0.0.1:0", "127.0.0.2:0"]"#, r#"cluster.transports=["tcp"]"#];
    let config = load(None, &[], &two).unwrap();
    assert_eq!((config.cluster.transfer.0.len(), config.cluster.transports.len()), (2, 1));
    assert_eq!(load(Some(&config.to_toml()), &[], &[]).unwrap(), config);
    check(&[secret, r#"cluster.transfer=["127.0.0.1:0", "10.0.0.1:0"]"#], &["10.0.0.1:0", "[cluster.tls]"]);
    check(&[secret, r#"cluster.transfer=["127.0.0.1:9", "127.0.0.1:9"]"#], &["taken by cluster.transfer"]);
    check(&[secret, "cluster.transfer=[]"], &["cluster.transfer", "must be an address"]);
    check(&[secret, "cluster.transfer=here"], &["cluster.transfer", "an address such as"]);
    check(&[secret, r#"cluster.transports=["udp"]"#], &["cluster.transports", "unknown variant `udp`"]);
    check(&[secret, r#"cluster.transports=["tcp", "tcp"]"#], &["cluster.transports", "listed twice"]);
    check(&[secret, "cluster.transfer=127.0.0.1:7423"], &["taken by cluster.listen"]);
    check(&[secret, "cluster.read_timeout=2s"], &["cluster.read_timeout", "tiering.load_timeout (2s)"]);
    check(&[secret, "store.reservation_ttl=1s"], &["store.reservation_ttl", "takes copies"]);
    check(&[secret, "cluster.audit_every=0s"], &["cluster.audit_every", "more than no time"]);
}

#[test]
fn the_data_folder_is_never_shared_by_default() {
    let check = |set: &[(&str, &str)], expected: Option<&str>| {
        let variable =
            |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
        assert_eq!(default_data_dir(variable), expected.map(PathBuf::from), "{set:?}");
    };
    check(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")], Some("/s/kvasir"));
    check(&[("XDG_STATE_HOME", ""), ("HOME", "/h")], Some("/h/.local/state/kvasir"));
    check(&[("XDG_RUNTIME_DIR", "/run/user/1")], Some("/run/user/1/kvasir"));
    check(&[("TMPDIR", "/tmp")], None);
    let mut config = Config::load(None, [], &[]).unwrap();
    config.node.data_dir = PathBuf::new();
    assert!(config.validate().unwrap_err().to_string().contains("node.data_dir"));
}
