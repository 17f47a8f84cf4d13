//! Pages for a pool before anybody writes to it, step by step: of 2 MiB where the kernel finds them.
//!
//! Most systems give shared memory small pages whatever they are advised, and yet make huge ones of a range when told to. That takes less
//! than half the time of as many small ones, 0.14 ms a MiB instead of 0.37, if there are some; otherwise the kernel must move what others have to
//! make room, and on a virtual machine the memory may be with its host (docs/design/0019-memory-of-a-pool.md).

use std::io;
use std::time::{Duration, Instant};

use crate::host::HostPool;
use crate::placing::Pages;

/// So large that what each call costs by itself (up to 5 ms) does not count.
const STEP: u64 = 32 << 20;
/// If a step takes longer, huge pages are not there to be taken.
const PATIENCE: Duration = Duration::from_millis(32);
/// For so many steps none is asked for then, which makes steps of 85 ms, as seen, a fifth of all the time. Memory may be free again later.
const REST: u32 = 32;

/// How far to go on asking for huge pages.
#[derive(Default)]
pub struct Filling {
    rest: u32,
}

impl Filling {
    /// Gives pages to the next bytes from `from` on, which is a multiple of a huge page. What is there already stays, whoever writes to it meanwhile.
    /// Returns where they end.
    ///
    /// # Errors
    /// There is no memory left.
    pub fn step(&mut self, pool: &HostPool, from: u64) -> io::Result<u64> {
        let to = pool.bytes().min(from.saturating_add(STEP));
        if from >= to {
            return Ok(to);
        }
        let range = pool.range(from, to);
        if pool.placed().pages == Pages::Transparent {
            self.ask(|| range.populate_huge());
        }
        range.populate()?;
        Ok(to)
    }

    /// What is refused is no error: small pages do as well.
    fn ask(&mut self, huge: impl FnOnce() -> io::Result<()>) {
        if self.rest > 0 {
            self.rest -= 1;
            return;
        }
        let began = Instant::now();
        if huge().is_err() || began.elapsed() > PATIENCE {
            self.rest = REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Mapping;
    use crate::placing::{HUGE_PAGE, Placing};
    use std::os::fd::AsFd;

    #[test]
    fn what_is_there_stays_and_what_comes_meanwhile_too() {
        let pool = HostPool::open(STEP + HUGE_PAGE + 4096, &Placing::default()).unwrap();
        let other = Mapping::new(pool.writable_fd().as_fd(), pool.bytes(), true).unwrap();
        let places = (0..pool.bytes()).step_by(4096 * 3);
        let byte = |at: u64| [(at >> 12) as u8];
        places.clone().filter(|at| at % 8192 == 0).for_each(|at| assert!(other.write(at, &byte(at))));
        std::thread::scope(|scope| {
            scope.spawn(|| places.clone().for_each(|at| assert!(other.write(at + 1, &byte(at)))));
            pool.fill().unwrap();
            assert!(pool.is_filled());
        });
        for at in places {
            let expected = [byte(at)[0] * u8::from(at % 8192 == 0), byte(at)[0]];
            assert_eq!(pool.mapping().bytes(at, 2).unwrap(), &expected[..], "{at}");
        }
    }

    #[test]
    fn steps_end_with_the_pool() {
        let pool = HostPool::open(STEP + 4096, &Placing::default()).unwrap();
        let mut filling = Filling::default();
        assert_eq!(filling.step(&pool, 0).unwrap(), STEP);
        assert_eq!(filling.step(&pool, STEP).unwrap(), STEP + 4096);
        assert_eq!(filling.step(&pool, STEP + HUGE_PAGE).unwrap(), STEP + 4096, "beyond it there is nothing");
    }

    #[test]
    fn a_kernel_that_refuses_is_left_alone_for_a_while() {
        let (mut filling, mut asked) = (Filling::default(), 0);
        for _ in 0..2 * REST {
            filling.ask(|| {
                asked += 1;
                Err(io::ErrorKind::OutOfMemory.into())
            });
        }
        assert_eq!(asked, 2);
    }
}
