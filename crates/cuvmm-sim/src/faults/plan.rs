//! [`Faults`]: which calls are to fail, when, and with which code.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{CUresult, Call, Failure, Hook, Invocation};

use super::log::push_last;
use super::random::{Drawing, Random};

/// Whether a call fails instead of taking effect, or after it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum When {
    /// The driver never sees the call.
    Before,
    /// The driver makes the call; if that succeeds, the caller is told that it failed.
    After,
}

/// A failure that there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The call that failed.
    pub call: Call,
    /// Whether its effect took place.
    pub when: When,
    /// What the caller was told.
    pub code: CUresult,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let when = match self.when {
            When::Before => "before",
            When::After => "after",
        };
        write!(f, "{} failed with {} {when} its effect", self.call, self.code)
    }
}

/// A plan of failures. Clones share it, so one is kept beside the driver that has the other.
///
/// ```
/// use cuvmm_driver::{Call, CUresult, Driver, Hooked};
/// use cuvmm_sim::{Faults, Machine, Simulator, When};
///
/// let faults = Faults::new();
/// let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), faults.clone()))?;
/// faults.fail(Call::cuMemAddressReserve, 2, CUresult::OUT_OF_MEMORY, When::Before);
/// assert!(driver.mem_address_reserve(2 << 20, 0, Default::default()).is_ok());
/// let error = driver.mem_address_reserve(2 << 20, 0, Default::default()).unwrap_err();
/// assert_eq!(error.code(), Some(CUresult::OUT_OF_MEMORY));
/// assert_eq!(faults.fired(), 1);
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Faults {
    plan: Arc<Mutex<Plan>>,
}

#[derive(Default)]
struct Plan {
    rules: Vec<Rule>,
    drawings: Vec<Drawing>,
    fired: usize,
    /// The last of them.
    faults: VecDeque<Fault>,
}

struct Rule {
    /// None for any call.
    call: Option<Call>,
    when: When,
    failure: Failure,
    which: Which,
}

/// Looks at a call's arguments.
type Predicate = Arc<dyn Fn(&[u64]) -> bool + Send + Sync>;

enum Which {
    /// After so many more of these calls.
    Left(usize),
    /// Each with such arguments.
    Matching(Predicate),
}

impl Faults {
    /// A plan without failures.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the `nth` call from now of that name fail once with `code`. 1 is the next; 0, and a `code` of success,
    /// plan nothing.
    pub fn fail(&self, call: Call, nth: usize, code: CUresult, when: When) {
        self.add_nth(Some(call), nth, code, when);
    }

    /// Makes the `nth` call from now fail once with `code`, whatever it is called. 1 is the next; 0, and a `code` of
    /// success, plan nothing. What no hook sees is not counted.
    ///
    /// ```
    /// use cuvmm_driver::{CUresult, Driver, Hooked};
    /// use cuvmm_sim::{Faults, Machine, Simulator, When};
    ///
    /// let faults = Faults::new();
    /// let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), faults.clone()))?;
    /// faults.fail_any(1, CUresult::UNKNOWN, When::Before);
    /// assert!(driver.mem_address_reserve(2 << 20, 0, Default::default()).is_err());
    /// assert!(driver.mem_address_reserve(2 << 20, 0, Default::default()).is_ok());
    /// # Ok::<(), cuvmm_driver::Error>(())
    /// ```
    pub fn fail_any(&self, nth: usize, code: CUresult, when: When) {
        self.add_nth(None, nth, code, when);
    }

    /// Makes each call of that name fail whose arguments, as in [`Invocation::arguments`], satisfy `matches`, which
    /// may itself plan, ask, or make calls.
    pub fn fail_when(
        &self,
        call: Call,
        matches: impl Fn(&[u64]) -> bool + Send + Sync + 'static,
        code: CUresult,
        when: When,
    ) {
        self.add(Some(call), code, when, Which::Matching(Arc::new(matches)));
    }

    /// Makes calls fail at random from now on, beside what else is planned. The same calls in the same order fail in
    /// the same way with the same seed, which the `Debug` form of the plan tells as long as they do.
    ///
    /// ```
    /// use cuvmm_driver::{CUresult, Call, Driver, Hooked};
    /// use cuvmm_sim::faults::Random;
    /// use cuvmm_sim::{Faults, Machine, Simulator};
    ///
    /// let run = |seed| {
    ///     let faults = Faults::new();
    ///     let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), faults.clone()))?;
    ///     let random = Random::new(seed).per_thousand(300).codes([CUresult::OUT_OF_MEMORY, CUresult::UNKNOWN]);
    ///     faults.fail_at_random(random.calls([Call::cuMemAddressReserve]));
    ///     for _ in 0..100 {
    ///         let _ = driver.mem_address_reserve(2 << 20, 0, Default::default());
    ///     }
    ///     Ok::<_, cuvmm_driver::Error>(faults.faults())
    /// };
    /// assert!(run(1)?.len() > 10);
    /// assert_eq!(run(1)?, run(1)?);
    /// assert_ne!(run(1)?, run(2)?);
    /// # Ok::<(), cuvmm_driver::Error>(())
    /// ```
    pub fn fail_at_random(&self, random: Random) {
        self.lock().drawings.push(Drawing::new(random));
    }

    /// Plans nothing more, and ends what is at random. What fired stays counted.
    pub fn clear(&self) {
        let mut plan = self.lock();
        plan.rules.clear();
        plan.drawings.clear();
    }

    /// How many failures there have been.
    pub fn fired(&self) -> usize {
        self.lock().fired
    }

    /// The failures there have been, in order: the last 262,144 where there were more.
    pub fn faults(&self) -> Vec<Fault> {
        self.lock().faults.iter().copied().collect()
    }

    fn add_nth(&self, call: Option<Call>, nth: usize, code: CUresult, when: When) {
        if let Some(left) = nth.checked_sub(1) {
            self.add(call, code, when, Which::Left(left));
        }
    }

    fn add(&self, call: Option<Call>, code: CUresult, when: When, which: Which) {
        if let Some(failure) = Failure::new(code) {
            self.lock().rules.push(Rule { call, when, failure, which });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn see(&self, invocation: &Invocation<'_>, when: When, may_fire: bool) -> Option<Failure> {
        let due = self.lock().due(invocation.call, when);
        if !may_fire {
            return None;
        }
        let fires = |(_, matches): &(Failure, Option<Predicate>)| {
            matches.as_ref().is_none_or(|matches| matches(invocation.arguments))
        };
        let (failure, _) = due.into_iter().find(fires)?;
        self.lock().fire(Fault { call: invocation.call, when, code: failure.code() });
        Some(failure)
    }
}

impl Plan {
    /// Counts a call; the failures that are due to it, or are if their predicate says so.
    fn due(&mut self, call: Call, when: When) -> Vec<(Failure, Option<Predicate>)> {
        let mut due = Vec::new();
        self.rules.retain_mut(|rule| {
            if rule.when != when || rule.call.is_some_and(|name| name != call) {
                return true;
            }
            match &mut rule.which {
                Which::Matching(matches) => due.push((rule.failure, Some(matches.clone()))),
                Which::Left(0) => {
                    due.push((rule.failure, None));
                    return false;
                }
                Which::Left(left) => *left -= 1,
            }
            true
        });
        due.extend(self.drawings.iter_mut().filter_map(|drawing| Some((drawing.draw(call, when)?, None))));
        due
    }

    fn fire(&mut self, fault: Fault) {
        self.fired += 1;
        push_last(&mut self.faults, fault);
    }
}

impl Hook for Faults {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        self.see(invocation, When::Before, true)
    }

    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        self.see(invocation, When::After, result.is_success())
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.lock();
        let random: Vec<&Random> = plan.drawings.iter().map(|drawing| &drawing.options).collect();
        f.debug_struct("Faults")
            .field("rules", &plan.rules.len())
            .field("random", &random)
            .field("fired", &plan.fired)
            .finish()
    }
}
