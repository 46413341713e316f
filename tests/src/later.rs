//! What is done later: waiting for it, and telling apart what a thread did itself.

use std::time::{Duration, Instant};

use cuvmm::VirtualMemoryResource;
use cuvmm::driver::Call;

use crate::backend::Backend;

/// How long a test waits for what takes a moment.
const PATIENCE: Duration = Duration::from_secs(30);

/// The moment that is so far away.
pub fn after(delay: Duration) -> Instant {
    Instant::now() + delay
}

/// Waits until nothing of a resource is pending, which must come to pass.
#[track_caller]
pub fn drain(resource: &VirtualMemoryResource) {
    resource.drain(after(PATIENCE)).expect("what is pending to go");
    assert_eq!((resource.pending(), resource.statistics().pending), (0, 0));
}

/// Waits until something holds, which must come to pass. What holds it up is named.
#[track_caller]
pub fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = after(PATIENCE);
    while !holds() {
        assert!(Instant::now() < deadline, "still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Backend {
    /// The calls that this thread makes while `work` runs, whatever other threads do, and what that returns.
    pub fn calls_here<T>(&self, work: impl FnOnce() -> T) -> (Vec<Call>, T) {
        let (before, here) = (self.ledger.total(), std::thread::current().id());
        let result = work();
        let calls = self.ledger.log_since(before).into_iter().filter(|made| made.thread == here);
        (calls.map(|made| made.call).collect(), result)
    }

    /// Demands that this thread makes no call while `work` runs.
    #[track_caller]
    pub fn require_no_call_here<T>(&self, work: impl FnOnce() -> T) -> T {
        let (calls, result) = self.calls_here(work);
        assert_eq!(calls, [], "calls of this thread");
        result
    }

    /// Demands that as many questions were asked where no call may be made, and nothing else was: whether a thread is in a
    /// host function is asked by a call that is refused there. The simulator takes note of each.
    #[track_caller]
    pub fn require_questions(&self, questions: usize) {
        if let Some(simulator) = &self.simulator {
            let calls: Vec<Call> = simulator.violations().iter().map(|violation| violation.call).collect();
            assert_eq!(calls, vec![Call::cuCtxGetCurrent; questions]);
            simulator.clear_violations();
        }
    }
}
