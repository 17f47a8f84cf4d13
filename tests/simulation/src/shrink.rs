//! The shortest schedule with which a seed still fails in the same way: steps of its plan are left out, many at a time and then
//! fewer, as long as it does (delta debugging; Zeller, Hildebrandt: TSE '02).
//!
//! With a step less, every later turn of the threads is another one. So a schedule is tried with several orders of turns before
//! it counts as one that does not fail.

use std::process::ExitCode;

use crate::plan::{Plan, Steps};
use crate::trial::Trial;

/// Orders of turns that are tried with a schedule, beside the one that failed last.
const ORDERS: u64 = 3;

/// Says what is left of a seed that fails. Success: it does.
pub(crate) fn shrink(trial: Trial) -> ExitCode {
    let Err(why) = trial.run() else {
        println!("seed {} does not fail", trial.seed);
        return ExitCode::FAILURE;
    };
    let plan = trial.plan();
    let all = plan.steps();
    println!("shrinks {} steps: {}", all.len(), violation(&why));
    let mut failing = Failing { kind: kind(&why), trial };
    let left = shortest(&plan, all.clone(), |steps| failing.still(steps));
    let Failing { mut trial, .. } = failing;
    trial.only = Some(left.clone());
    println!("\n{} of {} steps are left:", left.len(), all.len());
    plan.only(&left).events.iter().for_each(|event| println!("{event}"));
    println!("\nThis repeats it: cargo xtask simulate {} --trace", trial.args().join(" "));
    println!("What happens, by second, machine, thread:\n");
    println!("{}", trial.trace().unwrap_or_else(|error| error));
    ExitCode::SUCCESS
}

struct Failing {
    trial: Trial,
    kind: String,
}

impl Failing {
    /// Whether these steps alone fail in the same way, with any of some orders of turns.
    fn still(&mut self, steps: &Steps) -> bool {
        let seed = self.trial.seed;
        let now = self.trial.turns.unwrap_or(seed);
        let others = (1..=ORDERS).map(|n| seed.wrapping_add(n)).filter(|turns| *turns != now);
        for turns in [now].into_iter().chain(others) {
            let trial = Trial { only: Some(steps.clone()), turns: Some(turns), ..self.trial.clone() };
            if trial.run().is_err_and(|why| kind(&why) == self.kind) {
                self.trial.turns = Some(turns);
                return true;
            }
        }
        false
    }
}

/// What was promised and is not so.
fn violation(why: &str) -> &str {
    let line = why.lines().find_map(|line| line.strip_prefix("violated: "));
    let line = line.unwrap_or(why);
    line.rsplit_once(" (exit").map_or(line, |(line, _)| line)
}

/// The same without numbers: of another block or another host it is the same violation.
fn kind(why: &str) -> String {
    violation(why).split(|letter: char| letter.is_ascii_digit()).filter(|part| !part.is_empty()).collect()
}

/// As few steps as possible that still fail.
fn shortest(plan: &Plan, all: Steps, mut fails: impl FnMut(&Steps) -> bool) -> Steps {
    // First all calls of a client at once.
    let groups: Vec<Steps> = plan
        .events
        .iter()
        .map(|event| event.steps().into_iter().filter(|step| all.contains(step)).collect())
        .filter(|group: &Steps| !group.is_empty())
        .collect();
    let groups = without(groups, &mut fails);
    let single: Vec<Steps> = groups.iter().flatten().map(|step| Steps::from([*step])).collect();
    without(single, &mut fails).into_iter().flatten().collect()
}

/// Leaves out as many as possible: half of them, a quarter, and so on, those at the end first, and each single one until all are
/// needed.
fn without(mut groups: Vec<Steps>, fails: &mut impl FnMut(&Steps) -> bool) -> Vec<Steps> {
    let mut size = groups.len().div_ceil(2);
    while size > 0 {
        let mut end = groups.len();
        let mut shorter = false;
        while end > 0 {
            let start = end.saturating_sub(size);
            let rest = [&groups[..start], &groups[end..]].concat();
            if fails(&rest.iter().flatten().copied().collect()) {
                groups = rest;
                shorter = true;
            }
            end = start;
        }
        let again = shorter && size == 1;
        size = if again { 1 } else { size / 2 };
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_needed_is_left_out() {
        let plan = Plan::of(3, 3);
        let all = plan.steps();
        let needed = Steps::from([1, 50, *all.last().unwrap()]);
        let mut tried = 0;
        let left = shortest(&plan, all, |steps| {
            tried += 1;
            needed.is_subset(steps)
        });
        assert_eq!(left, needed);
        assert!(tried < 150, "{tried} schedules were tried");
    }

    #[test]
    fn the_same_violation_of_other_blocks() {
        let of = |text: &str| kind(&format!("seed 1\nviolated: {text}\n(exit status: 1)"));
        assert_eq!(of("block 17 is missing"), of("block 4 is missing"));
        assert_ne!(of("block 17 is missing"), of("block 17 is read with wrong bytes"));
    }
}
