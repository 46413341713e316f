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
    call: Call,
    when: When,
    failure: Failure,
    which: Which,
}

/// Looks at a call's arguments.
type Predicate = Box<dyn Fn(&[u64]) -> bool + Send>;

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
        self.add(call, code, when, Which::Left(nth.checked_sub(1)));
    }

    /// Makes each call of that name fail whose arguments, as in [`Invocation::arguments`], satisfy `matches`.
    pub fn fail_when(&self, call: Call, matches: impl Fn(&[u64]) -> bool + Send + 'static, code: CUresult, when: When) {
        self.add(call, code, when, Which::Matching(Box::new(matches)));
    }

    /// Plans nothing more. What fired stays counted.
    pub fn clear(&self) {
        self.lock().rules.clear();
    }

    /// How many failures there have been.
    pub fn fired(&self) -> usize {
        self.lock().fired
    }

    fn add(&self, call: Call, code: CUresult, when: When, which: Which) {
        if let Some(failure) = Failure::new(code) {
            self.lock().rules.push(Rule { call, when, failure, which });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn see(&self, invocation: &Invocation<'_>, when: When, may_fire: bool) -> Option<Failure> {
        let mut plan = self.lock();
        let mut failure = None;
        for rule in plan.rules.iter_mut().filter(|rule| rule.call == invocation.call && rule.when == when) {
            let fires = match &mut rule.which {
                Which::Matching(matches) => matches(invocation.arguments),
                Which::Left(left) => {
                    let now = *left == Some(0);
                    *left = left.and_then(|left| left.checked_sub(1));
                    now
                }
            };
            if fires && may_fire {
                failure = failure.or(Some(rule.failure));
            }
        }
        plan.fired += usize::from(failure.is_some());
        failure
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
