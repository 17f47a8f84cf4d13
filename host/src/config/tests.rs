use super::*;

mod wording;

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
    let store = config.store.dram;
    assert_eq!((store.pool_bytes, store.leases_max), (8 << 30, 7));
    assert_eq!((store.low_free, store.high_free), (0.0, 0.5));
    assert_eq!(Span(store.put_wait), Span::secs(3));
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
fn a_leader_elsewhere_is_followed_over_tls_or_a_network_said_to_be_trusted() {
    for set in [
        &["policy.follow=leader:7420", "policy.follow_ca=/ca"][..],
        &["policy.follow=leader:7420", "listen.allow_remote=true"],
        &["policy.follow=localhost:7420"],
        &["policy.follow=[::1]:7420", "policy.follow_token=/t"],
        &["policy.follow=unix:/control.sock"],
    ] {
        load(None, &[], set).unwrap();
    }
    let refused =
        load(None, &[], &["policy.follow=[::1]:7420", "policy.follow_token=kvasir_1_secret"]).unwrap_err();
    assert!(refused.contains("is the path of a file") && !refused.contains("secret"), "{refused}");
    let refused = load(None, &[], &["policy.follow=localhost.example.com:7420"]).unwrap_err();
    assert!(refused.contains("in the clear; set policy.follow_ca"), "{refused}");
}

#[test]
fn tenants_have_quotas_and_floors() {
    let file = "[[store.tenants]]\ntenant = 1\nquota_bytes = \"1MiB\"\nfloor_bytes = \"1KiB\"\n[[store.tenants]]\ntenant = 2\nweight = 3\n";
    let tenants = load(Some(file), &[], &[]).unwrap().store.dram.tenants;
    assert_eq!((tenants[0].quota_bytes, tenants[0].floor_bytes), (Some(1 << 20), Some(1 << 10)));
    assert_eq!((tenants[1].tenant, tenants[1].weight), (2, Some(3)));
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
    let check = |file: Option<&str>, environment: &[(&str, &str)], expected: &[&str]| {
        let message = load(file, environment, &[]).expect_err(expected[0]);
        for part in expected {
            assert!(message.contains(part), "`{message}` lacks `{part}`");
        }
    };
    check(Some("[store\n"), &[], &["FILE is not valid TOML", "line 1"]);
    check(Some("[stor]\nx = 1\n"), &[], &["FILE: unknown key `stor.x`", "did you mean `store`?"]);
    check(
        Some("[stor]\n"),
        &[],
        &["FILE: unknown key `stor`", "sections: access, cluster, conductor, explain, hbm, listen"],
    );
    check(Some("store = 3\n"), &[], &["`store` cannot be 3: it is a section"]);
    check(
        Some("[store]\npool_byte = \"1GiB\"\n"),
        &[],
        &["FILE: unknown key `store.pool_byte`", "did you mean `pool_bytes`?"],
    );
    check(
        Some("[store]\npool_bytes = \"lots\"\n"),
        &[],
        &["FILE", "`store.pool_bytes` cannot be \"lots\"", "8GiB"],
    );
    check(Some("[store]\npool_bytes = 5\n"), &[], &["`store.pool_bytes` cannot be 5", "expected a string"]);
    check(
        None,
        &[("KVASIR__STORE__PUTWAIT", "1s")],
        &["variable KVASIR__STORE__PUTWAIT", "did you mean `put_wait`?"],
    );
    check(None, &[("KVASIR__STORE__LEASES_MAX", "-1")], &["KVASIR__STORE__LEASES_MAX", "cannot be -1"]);
    let missing = Config::load(Some("/no/such/kvasir.toml".as_ref()), [], &[]).unwrap_err().to_string();
    assert!(missing.starts_with("cannot read the configuration /no/such/kvasir.toml"), "{missing}");
}

#[test]
fn with_tls_a_host_may_listen_anywhere() {
    let sealed = ["listen.tls.cert=/c", "listen.tls.key=/k"];
    let open = ["listen.grpc=0.0.0.0:7420", "listen.http=0.0.0.0:7421", "listen.data=0.0.0.0:7422"];
    load(None, &[], &[open.as_slice(), sealed.as_slice()].concat()).unwrap();
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
}

#[test]
fn a_cluster_has_peers_and_rails() {
    let secret = "cluster.secret_file=/run/secret";
    let peers = r#"cluster.peers=[{name = "b", address = "10.0.0.2:7423", rack = "r2"}, {name = "c", address = "c.example:7423"}]"#;
    let config = load(None, &[], &[secret, "node.name=a", peers]).unwrap();
    assert!(config.cluster.is_on() && !Config::default().cluster.is_on());
    assert_eq!((config.cluster.peers[0].rack.as_str(), config.cluster.peers[1].rack.as_str()), ("r2", ""));
    assert_eq!(load(Some(&config.to_toml()), &[], &[]).unwrap(), config);
    let tls = ["cluster.tls.cert=/c", "cluster.tls.key=/k", "cluster.tls.ca=/a", "cluster.listen=0.0.0.0:1"];
    assert!(load(None, &[], &[&[secret], &tls[..]].concat()).unwrap().cluster.tls.is_on());
    let two = [secret, r#"cluster.transfer=["127.0.0.1:0", "127.0.0.2:0"]"#, r#"cluster.transports=["tcp"]"#];
    let config = load(None, &[], &two).unwrap();
    assert_eq!((config.cluster.transfer.0.len(), config.cluster.transports.len()), (2, 1));
    assert_eq!(load(Some(&config.to_toml()), &[], &[]).unwrap(), config);
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
