//! [`Faults`]: which calls are to fail, when, and with which code.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{CUresult, Call, Failure, Hook, Invocation};

/// Whether a call fails instead of taking effect, or after it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum When {
    /// The driver never sees the call.
    Before,
    /// The driver makes the call; if that succeeds, the caller is told that it failed.
    After,
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
    fired: usize,
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
    /// After so many more of these calls; none once it fired.
    Left(Option<usize>),
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
        self.add(Some(call), code, when, Which::Left(nth.checked_sub(1)));
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
        self.add(None, code, when, Which::Left(nth.checked_sub(1)));
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

    /// Plans nothing more. What fired stays counted.
    pub fn clear(&self) {
        self.lock().rules.clear();
    }

    /// How many failures there have been.
    pub fn fired(&self) -> usize {
        self.lock().fired
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
        self.lock().fired += 1;
        Some(failure)
    }
}

impl Plan {
    /// Counts a call; the failures that are due to it, or are if their predicate says so.
    fn due(&mut self, call: Call, when: When) -> Vec<(Failure, Option<Predicate>)> {
        let mut due = Vec::new();
        for rule in self.rules.iter_mut().filter(|rule| rule.call.is_none_or(|name| name == call) && rule.when == when)
        {
            match &mut rule.which {
                Which::Matching(matches) => due.push((rule.failure, Some(matches.clone()))),
                Which::Left(left) => {
                    if *left == Some(0) {
                        due.push((rule.failure, None));
                    }
                    *left = left.and_then(|left| left.checked_sub(1));
                }
            }
        }
        due
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

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plan = self.lock();
        f.debug_struct("Faults").field("rules", &plan.rules.len()).field("fired", &plan.fired).finish()
    }
}
