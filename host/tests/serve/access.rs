//! Doors: who comes in, and what each may do once inside.

use crate::process::{Host, KVASIR, Transport, runtime};
use kvasir_client::control::{Control, ControlAddr};
use kvasir_client::data::{Client, Options};
use kvasir_dataplane::{BlockKey, BlockMeta};
use kvasir_proto as proto;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

/// Users without a name on most machines, so that nothing of theirs is there.
const LISTED: u32 = 65_431;
const STRANGER: u32 = 65_432;

/// A command as another user, who cannot enter the folder of the test's own binary.
fn as_user(user: u32, binary: &Path, host: &Host, args: &[&str]) -> Output {
    let mut command = Command::new(binary);
    command.args(args).uid(user).gid(user).env_clear().current_dir("/");
    command.env("KVASIR_HOST", format!("unix:{}", host.addr("socket")));
    command.env("KVASIR_GRPC", format!("unix:{}", host.addr("control")));
    command.stdin(std::process::Stdio::null()).output().unwrap()
}

#[test]
fn another_user_of_the_machine_gets_in_only_if_listed_and_then_only_as_far() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: taking the place of other users needs root");
        return;
    }
    let open = tempfile::tempdir().unwrap();
    std::fs::set_permissions(open.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let binary = open.path().join("kvasir");
    std::fs::copy(KVASIR, &binary).unwrap();
    let file = open.path().join("block");
    std::fs::write(&file, b"some bytes").unwrap();
    let file = file.to_str().unwrap();
    let set = [
        format!("node.socket={}", open.path().join("data.sock").display()),
        format!("node.control={}", open.path().join("control.sock").display()),
        format!("access.allow=[{{user=\"{LISTED}\", roles=[\"engine\"], tenant=3}}]"),
    ];
    let set: Vec<_> = set.iter().map(String::as_str).collect();
    let host = Host::start_with(&open.path().join("data"), &set);
    let check = |user, args: &[&str], code, part: &str| {
        let output = as_user(user, &binary, &host, args);
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(code), "{user} {args:?}: {text}");
        assert!(text.contains(part), "{user} {args:?}: `{text}` lacks `{part}`");
    };
    let stranger = format!("the caller is user {STRANGER}");
    check(STRANGER, &["put", "a", file], 2, &stranger);
    check(STRANGER, &["policy", "load", "evictor", "lru"], 2, &stranger);
    check(STRANGER, &["policy", "list"], 2, &stranger);
    check(LISTED, &["put", "a", file], 0, "stored 10 B");
    check(LISTED, &["get", "a"], 0, "some bytes");
    check(LISTED, &["rm", "a"], 2, "takes role operator, and the caller has: engine");
    check(LISTED, &["evict", "a"], 2, "takes role operator");
    check(LISTED, &["policy", "load", "evictor", "lru"], 2, "takes role policy");
    check(LISTED, &["ls"], 2, "takes role observer");
    // What it stored is its tenant's: for others there is no such block.
    host.check(&["exists", "a"], b"", 1, "missing");
    host.check(&["rm", "a"], b"", 1, "missing");
    // By default, nobody but the daemon's user even reaches the sockets.
    let closed = Host::start(&open.path().join("closed"));
    let output = as_user(STRANGER, &binary, &closed, &["put", "a", file]);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_token_opens_what_its_role_allows_until_it_is_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["listen.grpc=127.0.0.1:0"]);
    let runtime = runtime();
    let grpc = ControlAddr::Tcp(host.addr("grpc").to_owned());
    // One call of each role, and whether it was let through; what comes of it then is the call's own affair.
    let calls = |token: &str| {
        runtime.block_on(async {
            let mut c = Control::connect(&grpc, token).await.unwrap();
            let denied = |status: Option<tonic::Status>| {
                status.is_some_and(|status| status.code() == tonic::Code::PermissionDenied)
            };
            let rollback = proto::RollbackRequest { slot: "evictor".into() };
            [
                ("engine", denied(c.store.exists(proto::ExistsRequest { keys: vec![] }).await.err())),
                ("router", denied(c.conductor.schedule(proto::ScheduleRequest::default()).await.err())),
                ("observer", denied(c.node.info(proto::InfoRequest {}).await.err())),
                ("policy", denied(c.policy.rollback(rollback).await.err())),
                ("operator", denied(c.node.drain(proto::DrainRequest { resume: true }).await.err())),
            ]
        })
    };
    assert!(calls("").iter().all(|(_, denied)| *denied), "without a token nothing");
    for role in ["engine", "router", "observer", "policy", "operator"] {
        let token = host.token_for(&["--role", role]);
        for (needed, denied) in calls(&token) {
            assert_eq!(denied, role != needed && role != "operator", "{role} calls what takes {needed}");
        }
    }
    let token = host.token_for(&["--role", "engine", "--tenant", "3"]);
    let connect = |tenant| {
        let options = Options { token: token.clone(), tenant, ..Options::default() };
        Client::connect(&host.endpoint(Transport::Tcp), options)
    };
    let client = connect(0).unwrap();
    client.put(&BlockMeta::single(BlockKey::from_name("a"), 3), b"abc").unwrap();
    assert!(
        client.remove(&[BlockKey::from_name("a")]).unwrap_err().to_string().contains("takes role operator")
    );
    let other = connect(4).err().unwrap().to_string();
    assert!(other.contains("acts for tenant 3, not for tenant 4"), "{other}");
    // `kvasir_ID_SECRET`
    let id = token.split('_').nth(1).unwrap();
    let data = format!("node.data_dir={}", dir.path().display());
    let listed = host.check(&["token", "list", "--set", &data], b"", 0, id);
    assert!(!listed.contains(&token));
    host.check(&["token", "revoke", id, "--set", &data], b"", 0, "");
    assert!(connect(0).is_err());
    host.check(&["token", "revoke", id, "--set", &data], b"", 2, "there is no token");
}

#[test]
fn a_token_of_one_tenant_hears_of_no_other_and_asks_for_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["listen.grpc=127.0.0.1:0"]);
    host.check(&["put", "ours"], b"abc", 0, "stored");
    let engine = host.token_for(&["--role", "engine", "--tenant", "3"]);
    let options = Options { token: engine, ..Options::default() };
    let client = Client::connect(&host.endpoint(Transport::Tcp), options).unwrap();
    client.put(&BlockMeta::single(BlockKey::from_name("theirs"), 3), b"abc").unwrap();
    let runtime = runtime();
    let grpc = ControlAddr::Tcp(host.addr("grpc").to_owned());
    let listed = |token: &str| {
        runtime.block_on(async {
            let mut control = Control::connect(&grpc, token).await.unwrap();
            let page = control.store.list(proto::ListRequest::default()).await.unwrap();
            page.into_inner().blocks.len()
        })
    };
    assert_eq!(listed(&host.token_for(&["--role", "observer"])), 2, "the host's own sees all");
    assert_eq!(listed(&host.token_for(&["--role", "observer", "--tenant", "3"])), 1);
    let asked = |token: &str, tenant: u32| {
        runtime.block_on(async {
            let mut control = Control::connect(&grpc, token).await.unwrap();
            let request = proto::ScheduleRequest { tenant, prompt_tokens: 1, ..Default::default() };
            let schedule = proto::exchange_request::call::Call::Schedule(request.clone());
            let calls = vec![proto::exchange_request::Call { call: Some(schedule) }];
            let message = tokio_stream::once(proto::ExchangeRequest { calls });
            let streamed = control.conductor.exchange(message).await.unwrap().into_inner().message().await;
            let streamed = match streamed.unwrap().unwrap().answers.remove(0).answer {
                Some(proto::exchange_response::answer::Answer::Refusal(refusal)) => {
                    Some(tonic::Code::from(refusal.code))
                }
                _ => None,
            };
            let alone = control.conductor.schedule(request).await.err().map(|status| status.code());
            assert_eq!(streamed, alone, "tenant {tenant}");
            alone
        })
    };
    let router = host.token_for(&["--role", "router", "--tenant", "3"]);
    assert_eq!(asked(&router, 4), Some(tonic::Code::PermissionDenied));
    for (token, tenant) in [(&router, 0), (&router, 3), (&host.token_for(&["--role", "router"]), 4)] {
        assert_ne!(asked(token, tenant), Some(tonic::Code::PermissionDenied), "tenant {tenant}");
    }
}

/// What each call takes, a second time: a role that is changed in one place is noticed.
const CALLS: &[(&str, &[&str])] = &[
    (
        "engine",
        &[
            "Store/Exists",
            "Store/Push",
            "Store/Endpoints",
            "Conductor/Register",
            "Conductor/Unregister",
            "Conductor/ReportLoad",
            "Conductor/BlocksStored",
            "Conductor/BlocksRemoved",
            "Conductor/ResetBlocks",
        ],
    ),
    ("router", &["Conductor/Schedule", "Conductor/Complete", "Conductor/Exchange", "Conductor/LookupPrefix"]),
    (
        "observer",
        &[
            "Store/Stat",
            "Store/List",
            "Store/Usage",
            "PolicyAdmin/List",
            "PolicyAdmin/Logs",
            "PolicyAdmin/History",
            "PolicyRollouts/List",
            "Explain/Decision",
            "Explain/Block",
            "Node/Info",
            "Node/Ready",
            "Node/Peers",
        ],
    ),
    (
        "policy",
        &[
            "PolicyAdmin/Load",
            "PolicyAdmin/Configure",
            "PolicyAdmin/Promote",
            "PolicyAdmin/Rollback",
            "PolicyAdmin/Pause",
            "PolicyAdmin/Resume",
            "PolicyRollouts/Start",
            "PolicyRollouts/Change",
            "PolicyRollouts/Follow",
            "PolicyRollouts/Fetch",
        ],
    ),
    ("operator", &["Store/Remove", "PolicyAdmin/Fetch", "Node/Drain", "Node/MoveClock"]),
];

#[test]
fn a_token_of_each_role_makes_exactly_its_calls() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["listen.grpc=127.0.0.1:0", "listen.data=127.0.0.1:0"]);
    let runtime = runtime();
    let listed = CALLS.iter().map(|(_, calls)| calls.len()).sum::<usize>();
    let served: usize = kvasir_calls();
    assert_eq!(listed, served, "a call of the contract is missing above");
    for (role, _) in CALLS {
        let token = host.token_for(&["--role", role]);
        let endpoint = format!("http://{}", host.addr("grpc"));
        runtime.block_on(async {
            let channel = tonic::transport::Endpoint::new(endpoint).unwrap().connect().await.unwrap();
            for (needed, path) in CALLS.iter().flat_map(|(role, calls)| calls.iter().map(move |c| (role, c)))
            {
                let mut call = tonic::Request::new(());
                let bearer = format!("Bearer {token}").parse().unwrap();
                call.metadata_mut().insert("authorization", bearer);
                let mut client = tonic::client::Grpc::new(channel.clone());
                client.ready().await.unwrap();
                let path = format!("/kvasir.v1.{path}").parse().unwrap();
                // An empty message: what comes of it is the call's own affair.
                let answer = client.unary(call, path, tonic_prost::ProstCodec::<(), ()>::default()).await;
                let denied = answer.is_err_and(|status| status.code() == tonic::Code::PermissionDenied);
                assert_eq!(denied, role != needed && *role != "operator", "{role} calls what takes {needed}");
            }
        });
        let options = Options { token, ..Options::default() };
        let data = Client::connect(&host.endpoint(Transport::Tcp), options);
        assert_eq!(data.is_ok(), ["engine", "operator"].contains(role), "{role} says hello");
    }
}

/// How many calls Kvasir's own services have.
fn kvasir_calls() -> usize {
    use prost::Message;
    let files = prost_types::FileDescriptorSet::decode(proto::DESCRIPTORS).unwrap().file;
    let own = files.iter().filter(|file| file.package() == "kvasir.v1");
    own.flat_map(|file| &file.service).map(|service| service.method.len()).sum()
}

#[test]
fn pages_and_acts_are_guarded_and_noted() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let get = |path: &str, token: &str| {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(host.addr("http")).unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    assert!(get("/livez", "").starts_with("HTTP/1.1 200") && get("/readyz", "").starts_with("HTTP/1.1 200"));
    // Which components there are is told to everyone, what serves in them to observers.
    let (stranger, observer) = (get("/readyz?verbose", ""), host.page("/readyz?verbose"));
    assert!(
        stranger.contains("[+] policies\n") && observer.contains("[+] policies: "),
        "{stranger} {observer}"
    );
    let refused = get("/metrics", "");
    assert!(refused.starts_with("HTTP/1.1 403") && refused.contains("kvasir token new"), "{refused}");
    assert!(get("/metrics", &host.token_for(&["--role", "observer"])).contains("kvasir_"));
    assert!(get("/nothing", &host.token()).starts_with("HTTP/1.1 403"));
    assert!(host.page("/metrics").contains("kvasir_"), "the kernel knows who asks on the socket");
    host.check(&["policy", "load", "evictor", "lru"], b"", 0, "lru");
    host.check(&["policy", "load", "evictor", "no-such"], b"", 2, "");
    host.check(&["rm", "a", "b"], b"", 1, "missing");
    host.check(&["evict", "a"], b"", 1, "missing");
    let audit = std::fs::read_to_string(dir.path().join("audit.log")).unwrap();
    let lines: Vec<serde_json::Value> =
        audit.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let loads: Vec<_> = lines.iter().filter(|line| line["what"] == "/kvasir.v1.PolicyAdmin/Load").collect();
    assert_eq!((loads.len(), &loads[0]["outcome"], &loads[0]["from"]), (2, &"done".into(), &"unix".into()));
    let line = |what: &str| {
        let found = lines.iter().find(|line| line["what"] == what);
        found.unwrap_or_else(|| panic!("no line about `{what}`: {audit}"))
    };
    assert_eq!(
        (&line("remove")["outcome"], &line("remove")["from"]),
        (&"done: 0 of 2".into(), &"unix".into())
    );
    assert_eq!(line("evict")["outcome"], "done: 0 of 1");
    assert!(line("token new")["on"].as_str().unwrap().contains("observer, tenant 0"), "{audit}");
    assert!(loads[0]["on"].as_str().unwrap().starts_with("evictor: lru"), "{}", loads[0]);
    assert!(loads[1]["on"].as_str().unwrap().starts_with("evictor"), "{}", loads[1]);
    assert!(loads[0]["who"].as_str().unwrap().starts_with("user "), "{loads:?}");
    let outcome = loads[1]["outcome"].as_str().unwrap();
    assert!(outcome.starts_with("grpc status") && !outcome.contains("%20"), "in plain text: {outcome}");
}

#[test]
fn an_open_connection_ends_when_its_token_is_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let (kept, token) = (host.token(), host.token_for(&["--role", "engine"]));
    let connect = |token: &str| {
        let options = Options { token: token.to_owned(), ..Options::default() };
        Client::connect(&host.endpoint(Transport::Tcp), options).unwrap()
    };
    let (client, other) = (connect(&token), connect(&kept));
    let ask = |client: &Client| client.exists(&[BlockKey::from_name("a")]);
    assert!(ask(&client).is_ok());
    let data = format!("node.data_dir={}", dir.path().display());
    host.check(&["token", "revoke", token.split('_').nth(1).unwrap(), "--set", &data], b"", 0, "");
    crate::replicas::until("the connection ends", || ask(&client).is_err());
    assert!(ask(&client).is_err(), "and stays ended");
    assert!(ask(&other).is_ok(), "those of other tokens go on");
}

const SHARED: u16 = 60_001;

#[test]
fn tenants_share_what_they_put_into_a_namespace_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let set = format!("access.namespaces=[{{name=\"shared-prompts\", number={SHARED}}}]");
    let host = Host::start_with(dir.path(), &[&set]);
    let token = |tenant: u16, more: &[&str]| {
        let tenant = tenant.to_string();
        let args = ["--role", "engine", "--tenant", &tenant, "--set", &set];
        host.token_for(&[&args, more].concat())
    };
    let member = ["--namespace", "shared-prompts"];
    let (three, four, five) = (token(3, &member), token(4, &member), token(5, &[]));
    let connect = |token: &str, tenant| {
        let options = Options { token: token.to_owned(), tenant, ..Options::default() };
        Client::connect(&host.endpoint(Transport::Tcp), options)
    };
    let key = BlockKey::from_name("system prompt");
    connect(&three, SHARED).unwrap().put(&BlockMeta::single(key, 6), b"prompt").unwrap();
    let read = |token: &str, tenant| {
        let block = connect(token, tenant).unwrap().get(&[key], 0).unwrap().remove(0);
        block.map(|block| block.bytes().unwrap().to_vec())
    };
    assert_eq!(read(&four, SHARED).as_deref(), Some(&b"prompt"[..]));
    assert_eq!([read(&three, 0), read(&four, 0), read(&five, 0)], [None, None, None], "it is nobody's own");
    let refused = connect(&five, SHARED).err().unwrap().to_string();
    assert!(refused.contains("not for tenant 60001"), "{refused}");
    let taken = Command::new(KVASIR)
        .args(["token", "new", "--role", "engine", "--tenant", &SHARED.to_string(), "--set", &set])
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&taken.stderr).contains("number of namespace shared-prompts"),
        "{taken:?}"
    );
}

#[test]
fn keys_over_grpc_reach_the_blocks_of_the_callers_tenant_only() {
    let plan = crate::replicas::Plan::new(2);
    let hosts = [0, 1].map(|n| plan.start(n, &["listen.grpc=127.0.0.1:0".to_owned()]));
    crate::replicas::until("peers", || {
        hosts.iter().all(|host| crate::replicas::metric(host, "kvasir_peer_up", "") == 1)
    });
    let token = |tenant| hosts[0].token_for(&["--role", "engine", "--role", "observer", "--tenant", tenant]);
    let (owner, other) = (token("3"), token("4"));
    let options = Options { token: owner.clone(), ..Options::default() };
    let client = Client::connect(&hosts[0].endpoint(Transport::Tcp), options).unwrap();
    let name = BlockKey::from_name("a");
    client.put(&BlockMeta::single(name, 3), b"abc").unwrap();
    let runtime = runtime();
    let grpc = ControlAddr::Tcp(hosts[0].addr("grpc").to_owned());
    // Whether it exists, has a description, and was pushed.
    let reach = |token: &str, key: BlockKey| {
        runtime.block_on(async {
            let mut c = Control::connect(&grpc, token).await.unwrap();
            let keys: Vec<Vec<u8>> = vec![key.0.to_be_bytes().into()];
            let exists = c.store.exists(proto::ExistsRequest { keys: keys.clone() });
            let exists = exists.await.unwrap().into_inner().resident[0];
            let stat = c.store.stat(proto::StatRequest { keys: keys.clone() });
            let stat = stat.await.unwrap().into_inner().results[0].block.is_some();
            let to = "host-1".to_owned();
            let push = c.store.push(proto::PushRequest { to, keys });
            let push = push.await.unwrap().into_inner().outcomes().next().unwrap();
            (exists, stat, push)
        })
    };
    use proto::push_response::Outcome::{Done, Missing};
    for key in [name, name.of_tenant(3)] {
        assert_eq!(reach(&other, key), (false, false, Missing), "{key}");
    }
    assert_eq!(reach(&owner, name), (true, true, Done), "it need not name itself");
}
