//! Clients that are stopped in the middle of a write and wake after its time, and one that dies reading.

use super::{BLOCK, Peace, Raw, in_time, key, meta};
use crate::process::{Host, Transport, content};
use crate::replicas::{metric, until};
use kvasir_dataplane::wire::Request;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Before the lines that a faulty client says to its test.
const MARK: &str = "HARM ";
const SOCKET: &str = "KVASIR_HARM_SOCKET";

/// A faulty client in a process of its own.
struct Puppet {
    child: Child,
    says: BufReader<ChildStdout>,
    hears: ChildStdin,
}

impl Puppet {
    /// Runs the ignored test of that name as the client.
    fn start(host: &Host, part: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("harm::stopped::{part}"), "--ignored", "--nocapture"]);
        command.env(SOCKET, host.addr("socket")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (says, hears) = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
        Self { child, says: BufReader::new(says), hears }
    }

    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(MARK) {
            line.clear();
            assert!(self.says.read_line(&mut line).unwrap() > 0, "it ended before it said {word}");
        }
        assert!(line.contains(word), "{line} instead of {word}");
    }

    fn tell(&mut self) {
        self.hears.write_all(b"\n").unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it, and returns once it no longer runs.
    fn stop(&self) {
        self.signal(Signal::STOP);
        until("the client is stopped", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
            stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
        });
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// On the client's side.
fn say_and_wait(word: &str) {
    println!("\n{MARK}{word}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

#[test]
#[ignore = "no test of its own: a process that the test of stopped clients starts"]
fn a_slow_writer() {
    let mut raw = Raw::connect(&std::env::var(SOCKET).unwrap(), false);
    let half = BLOCK / 2;
    let junk = vec![0xee; half as usize];
    for (n, stage) in (2_000..).zip(["reserved", "half filled", "filled"]) {
        let (reservation, offset) = raw.reserve(n).unwrap();
        let fill = |raw: &Raw, part: u32| raw.pool().write(offset + u64::from(part * half), &junk);
        if stage == "filled" {
            assert!(fill(&raw, 0) && fill(&raw, 1));
        } else if stage == "half filled" {
            assert!(fill(&raw, 0));
        }
        say_and_wait(stage);
        // What a copy does that goes on where it was stopped.
        assert!(fill(&raw, 0) && fill(&raw, 1));
        let sum = kvasir_dataplane::checksum(&vec![0xee; BLOCK as usize]);
        let outcomes = raw.outcomes(&Request::Commit(vec![(reservation, sum)]));
        say_and_wait(&format!("committed: {outcomes:?}"));
    }
}

#[test]
fn a_writer_that_wakes_after_its_time_changes_no_block_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["store.reservation_ttl=2s"]);
    let peace = Peace::new(&host);
    let client = host.client(Transport::Unix);
    let mut writer = Puppet::start(&host, "a_slow_writer");
    for (turn, stage) in (0..).zip(["reserved", "half filled", "filled"]) {
        writer.wait_for(stage);
        writer.stop();
        until("its time is over", || metric(&host, "kvasir_quarantined_bytes", "") >= u64::from(BLOCK));
        // Everything else in the pool is used again, more than once.
        let first = 3_000 + turn * 200;
        for n in first..first + 128 {
            in_time(|| client.put(&meta(n), &content(n, BLOCK)).map(drop));
        }
        writer.signal(Signal::CONT);
        writer.tell();
        writer.wait_for("committed: [Aborted]");
        let mut found = 0;
        for n in first..first + 128 {
            let Some(block) = client.get(&[key(n)], 0).unwrap().remove(0) else { continue };
            assert!(block.bytes().unwrap() == content(n, BLOCK), "block {n} after one that was {stage}");
            found += 1;
        }
        assert!(found > 16, "{found} were left to compare");
        assert!(client.get(&[key(2_000 + turn)], 0).unwrap()[0].is_none(), "{stage}");
        until("its place is free again", || metric(&host, "kvasir_quarantined_bytes", "") == 0);
        writer.tell();
    }
    assert_eq!(client.checksum_failures(), 0);
    drop(writer);
    peace.holds("a writer that was stopped");
}

#[test]
#[ignore = "no test of its own: a process that the test of dying clients starts"]
fn a_reader_and_writer() {
    let mut raw = Raw::connect(&std::env::var(SOCKET).unwrap(), false);
    let leases = (1_000..1_064).filter_map(|n| raw.lease(n)).count();
    assert!(leases > 16, "{leases}");
    (2_000..2_004).for_each(|n| assert!(raw.reserve(n).is_some()));
    say_and_wait("holds much");
}

#[test]
fn a_client_that_dies_gives_back_what_it_held() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let peace = Peace::new(&host);
    let others = metric(&host, "kvasir_leases", "");
    let mut reader = Puppet::start(&host, "a_reader_and_writer");
    reader.wait_for("holds much");
    until("its leases are known", || metric(&host, "kvasir_leases", "") > others + 16);
    reader.signal(Signal::KILL);
    until("its leases have ended", || metric(&host, "kvasir_leases", "") == others);
    // A lease or a place that were still held would make some of these fail: leases last minutes here.
    let client = host.client(Transport::Unix);
    for n in 3_000..3_128 {
        client.put(&meta(n), &content(n, BLOCK)).unwrap();
    }
    assert!(client.put(&meta(2_000), &content(2_000, BLOCK)).is_ok(), "its places are free");
    peace.holds("a client that died");
}
