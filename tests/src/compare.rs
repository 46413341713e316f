//! Benchmarks on whatever driver is asked for, and two ways to do one thing, timed in turn: what else happens on the machine
//! happens to both.

use std::time::Duration;

use cuvmm::Driver;
use cuvmm_sim::{Machine, Simulator};

/// Names the driver.
const DRIVER: &str = "CUVMM_DRIVER";

/// The driver that a benchmark runs on: a simulated one, or, where `CUVMM_DRIVER` is `cuda`, that of a GPU.
pub fn benched_driver() -> Driver {
    if is_gpu_benched() {
        Driver::load().unwrap_or_else(|error| panic!("{error}"))
    } else {
        Simulator::new(Machine::h200()).driver().unwrap()
    }
}

/// Whether that is a GPU's.
pub fn is_gpu_benched() -> bool {
    match std::env::var(DRIVER).as_deref() {
        Ok("cuda") => true,
        Ok(other) => panic!("{DRIVER} is {other:?}: it may be \"cuda\", for a GPU, or not be there"),
        Err(_) => false,
    }
}

/// How long something took, each time.
#[derive(Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Of that many rounds of one thing alone, after a tenth as many that are not counted.
    pub fn of(rounds: usize, mut once: impl FnMut() -> Duration) -> Self {
        let times = (0..rounds / 10 + rounds).map(|_| once());
        Self::sorted(times.skip(rounds / 10).collect())
    }

    fn sorted(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self(times)
    }

    /// Adds those of more rounds of the same.
    pub fn add(&mut self, more: Self) {
        self.0.extend(more.0);
        self.0.sort_unstable();
    }

    /// What so many of a thousand are at most; zero where there are none.
    fn permille(&self, share: usize) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get(last * share / 1000).copied().unwrap_or_default()
    }

    /// The middle one.
    pub fn median(&self) -> Duration {
        self.permille(500)
    }

    /// The 99th percentile.
    pub fn p99(&self) -> Duration {
        self.permille(990)
    }

    /// The sum.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<Duration> for Times {
    fn from_iter<I: IntoIterator<Item = Duration>>(times: I) -> Self {
        Self::sorted(times.into_iter().collect())
    }
}

/// Times `ours` and `theirs` in turn, each of them as often the first, after a tenth as many rounds that are not counted.
pub fn compare(
    rounds: usize,
    mut ours: impl FnMut() -> Duration,
    mut theirs: impl FnMut() -> Duration,
) -> (Times, Times) {
    let [ours, theirs] = in_turn(rounds, [&mut ours, &mut theirs]);
    (ours, theirs)
}

/// Times several ways in turn, after a tenth as many rounds that are not counted: forwards and backwards, so that what the one
/// before left behind is the same for the first and the last.
pub fn in_turn<const N: usize>(rounds: usize, ways: [&mut dyn FnMut() -> Duration; N]) -> [Times; N] {
    let mut times = [const { Vec::new() }; N];
    for round in 0..rounds / 10 + rounds {
        for index in 0..N {
            let index = if round % 2 == 0 { index } else { N - 1 - index };
            let took = ways[index]();
            if round >= rounds / 10 {
                times[index].push(took);
            }
        }
    }
    times.map(Times::sorted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_done_as_often_and_each_first_every_second_time() {
        let order = std::cell::RefCell::new(String::new());
        let once = |name, time| {
            order.borrow_mut().push(name);
            Duration::from_micros(time)
        };
        let (ours, theirs) = compare(20, || once('o', 3), || once('t', 5));
        assert_eq!(order.borrow().as_str(), "ottoottoottoottoottoottoottoottoottoottoottoo".get(..44).unwrap());
        assert_eq!((ours.0.len(), theirs.0.len()), (20, 20));
        assert_eq!([ours.median(), theirs.median()], [3, 5].map(Duration::from_micros));
    }

    #[test]
    fn the_median_and_the_99th_percentile_are_told() {
        let mut next = 0;
        let times = Times::of(200, || {
            next += 1;
            Duration::from_micros(next)
        });
        // The first 20 are not counted.
        assert_eq!([times.median(), times.p99()], [120, 218].map(Duration::from_micros));
        assert_eq!((times.len(), times.total()), (200, Duration::from_micros((21..=220).sum())));
    }

    #[test]
    fn what_is_added_counts_as_if_it_was_there() {
        let times = |range: std::ops::Range<u64>| Times::from_iter(range.map(Duration::from_micros));
        let mut all = times(10..20);
        all.add(times(0..10));
        assert_eq!((all.len(), all.median()), (20, Duration::from_micros(9)));
    }
}
