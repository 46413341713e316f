//! [`Random`]: failures that nobody scripted, the same in every run with the same seed.

use cuvmm_driver::{CUresult, Call, Failure};

use super::plan::When;

/// Failures at random, half of them before the call's effect and half after it unless [`Random::when`] says otherwise.
/// Plain options, for [`Faults::fail_at_random`](super::Faults::fail_at_random).
///
/// What a call made that fails after its effect is lost to the caller, and stays behind: a test that nothing does has
/// them fail before it alone.
///
/// ```
/// use cuvmm_driver::{CUresult, Call};
/// use cuvmm_sim::faults::{Random, When};
///
/// let random = Random::new(42).per_thousand(50).calls([Call::cuMemMap, Call::cuMemSetAccess]).codes([CUresult(2)]);
/// let random = random.when(When::Before);
/// assert_eq!(random.seed, 42);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Random {
    /// What they follow from, together with the calls that are made, in their order.
    pub seed: u64,
    /// How many of a thousand calls fail, about.
    pub per_thousand: u32,
    /// The calls that may fail; none for every call.
    pub calls: Vec<Call>,
    /// The codes that they fail with; success among them counts for nothing.
    pub codes: Vec<CUresult>,
    /// Whether they fail instead of taking effect, or after it; none for half of them each.
    pub when: Option<When>,
}

impl Random {
    /// About one of a hundred calls, whatever it is called, with 999.
    pub fn new(seed: u64) -> Self {
        Self { seed, per_thousand: 10, calls: Vec::new(), codes: vec![CUresult::UNKNOWN], when: None }
    }

    /// With so many of a thousand calls.
    #[must_use]
    pub fn per_thousand(self, per_thousand: u32) -> Self {
        Self { per_thousand, ..self }
    }

    /// With these calls alone.
    #[must_use]
    pub fn calls(self, calls: impl Into<Vec<Call>>) -> Self {
        Self { calls: calls.into(), ..self }
    }

    /// With these codes.
    #[must_use]
    pub fn codes(self, codes: impl Into<Vec<CUresult>>) -> Self {
        Self { codes: codes.into(), ..self }
    }

    /// With failures of that kind alone.
    #[must_use]
    pub fn when(self, when: When) -> Self {
        Self { when: Some(when), ..self }
    }
}

/// Failures at random that are under way.
pub(crate) struct Drawing {
    pub(crate) options: Random,
    failures: Vec<Failure>,
    state: u64,
}

impl Drawing {
    pub(crate) fn new(options: Random) -> Self {
        let failures = options.codes.iter().filter_map(|&code| Failure::new(code)).collect();
        Self { failures, state: options.seed, options }
    }

    /// Draws for a call: before its effect, and after it for those that did not fail before, so that each time as
    /// many fail. Where only one of them is meant, all fail there.
    pub(crate) fn draw(&mut self, call: Call, when: When) -> Option<Failure> {
        let failing = u64::from(self.options.per_thousand.min(1000));
        let among = match (self.options.when, when) {
            (None, When::Before) => 2000,
            (None, When::After) => 2000 - failing,
            (Some(only), when) if only == when => 1000,
            (Some(_), _) => return None,
        };
        let meant = self.options.calls.is_empty() || self.options.calls.contains(&call);
        if !meant || self.failures.is_empty() || self.next() % among >= failing {
            return None;
        }
        let index = self.next() % self.failures.len() as u64;
        self.failures.get(index as usize).copied()
    }

    /// The next number of SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}
