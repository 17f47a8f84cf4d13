//! Removals, and hosts that were away while others removed or put.

use std::net::Shutdown;
use std::sync::atomic::AtomicBool;

use super::*;

/// A way from one host to another that can be closed.
struct Gate {
    addr: SocketAddr,
    open: Arc<AtomicBool>,
    /// Both ends of what goes through it.
    through: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let gate = Self {
            addr: listener.local_addr().unwrap(),
            open: Arc::new(AtomicBool::new(true)),
            through: Arc::default(),
        };
        let (open, through) = (Arc::clone(&gate.open), Arc::clone(&gate.through));
        // Ends with the process.
        thread::spawn(move || {
            for from in listener.incoming().flatten() {
                let mut through = through.lock().unwrap();
                // Closed: the caller sees a connection that ends at once.
                if open.load(Ordering::SeqCst)
                    && let Ok(to) = TcpStream::connect(target)
                {
                    pump(&from, &to);
                    pump(&to, &from);
                    through.extend([from, to]);
                }
            }
        });
        gate
    }

    fn close(&self) {
        let mut through = self.through.lock().unwrap();
        self.open.store(false, Ordering::SeqCst);
        through.drain(..).for_each(|end| drop(end.shutdown(Shutdown::Both)));
    }

    fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}

fn pump(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}

/// Has the host reach peer `n` through a gate.
fn through(config: &mut ClusterConfig, n: usize, gate: &Gate) {
    let name = format!("host-{n}");
    config.peers.iter_mut().filter(|peer| peer.name == name).for_each(|p| p.address = gate.addr.to_string());
}

fn sees(host: &Host, n: usize) -> bool {
    let name = format!("host-{n}");
    host.cluster.peers().iter().any(|peer| peer.name == name && peer.state == LinkState::Up)
}

fn remove(host: &Host, n: u32) {
    let removed = host.tiering.remove(&[key(n)], host.clock.now_ms()).unwrap();
    assert_eq!(removed, [Remove::Removed]);
}

/// Two hosts are away at a removal. The first that returns is told; the second finds only that one.
#[test]
fn a_host_that_was_told_of_a_removal_tells_the_next() {
    let ports = ports(4);
    let hosts = [0, 1, 2, 3].map(|n| Host::start(n, &ports, |_| {}));
    until("all are up", || hosts.iter().all(|host| host.up() == 3));
    hosts[0].put_copies(0..2, 4);
    until("copies", || settled(&hosts.iter().collect::<Vec<_>>(), 0..2, 4));
    let [zero, one, two, three] = hosts;
    two.cluster.stop();
    three.cluster.stop();
    until("their loss is known", || zero.up() == 1 && one.up() == 1);
    remove(&zero, 0);

    let three = three.run_again();
    until("it is up and told", || three.up() == 2 && sees(&zero, 3) && !three.is_resident(0));
    drop((zero, one));
    let two = two.run_again();
    until("these two are up", || sees(&two, 3) && sees(&three, 2));
    until("the other is told", || !two.is_resident(0));
    until("and nobody claims it", || agreed(&[&two, &three], 0..1, 0));
    assert!(!three.is_resident(0) && two.reads(1) && three.reads(1));
}

#[test]
fn a_removal_outlives_a_restart_of_all_that_heard_of_it() {
    let (ports, dir) = (ports(2), tempfile::tempdir().unwrap());
    let start = |n: usize| {
        Host::start(n, &ports, |config| config.removals = Some(dir.path().join(format!("removals-{n}"))))
    };
    let [zero, one] = [start(0), start(1)];
    until("both are up", || zero.up() == 1 && one.up() == 1);
    zero.put_copies(0..2, 2);
    until("copies", || settled(&[&zero, &one], 0..2, 2));
    one.cluster.stop();
    until("its loss is known", || zero.up() == 0);
    remove(&zero, 0);

    let (config, store, clock) = (zero.cluster.config().clone(), Arc::clone(&zero.store), zero.clock);
    drop(zero);
    let (zero, one) = (Host::join(config, store, clock), one.run_again());
    until("both are up again", || zero.up() == 1 && one.up() == 1);
    until("it is told", || !one.is_resident(0));
    until("nobody claims it", || settled(&[&zero, &one], 0..1, 0) && settled(&[&zero, &one], 1..2, 2));
    assert!(!zero.is_resident(0));
}

/// The converse: what is stored again stays, whoever still speaks of the removal.
#[test]
fn an_old_removal_does_not_drop_what_was_put_again() {
    let ports = ports(3);
    let (to_two, to_one) = (Gate::to(ports[2]), Gate::to(ports[1]));
    let zero = Host::start(0, &ports, |_| {});
    let one = Host::start(1, &ports, |config| through(config, 2, &to_two));
    let two = Host::start(2, &ports, |config| through(config, 1, &to_one));
    until("all are up", || [&zero, &one, &two].iter().all(|host| host.up() == 2));
    zero.put_copies(0..2, 3);
    until("copies", || settled(&[&zero, &one, &two], 0..2, 3));
    [&to_two, &to_one].iter().for_each(|gate| gate.close());
    two.cluster.stop();
    until("its loss is known", || zero.up() == 1 && one.up() == 1);
    for n in 0..2 {
        remove(&zero, n);
    }

    // It returns, and only the remover reaches it. Then one is put for one copy there, the other for two.
    let two = two.run_again();
    until("it is told", || sees(&two, 0) && sees(&zero, 2) && !two.is_resident(0) && !two.is_resident(1));
    two.put(0);
    two.put_copies(1..2, 2);
    until("the copy", || zero.is_resident(1));
    [&to_two, &to_one].iter().for_each(|gate| gate.open());
    until("all see each other", || sees(&one, 2) && sees(&two, 1));
    until("all agree", || settled(&[&zero, &one, &two], 1..2, 2));
    assert!(two.is_resident(0), "for one copy");
    assert!(two.is_resident(1) && zero.is_resident(1), "for two");
    assert!(two.reads(0) && two.reads(1) && one.reads(1));
}
