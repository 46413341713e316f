//! What belongs to a thread of the application, until it ends.

use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use cuvmm_driver::sys::CUstreamCaptureMode;

use crate::simulator::Shared;
use crate::state::State;

/// What belongs to a thread.
#[derive(Default)]
pub(crate) struct Thread {
    /// Its contexts, the current one last.
    pub(crate) stack: Vec<u64>,
    pub(crate) mode: CUstreamCaptureMode,
    /// What it runs of the application's, the innermost last: where streams are stepped by hand, one can run what
    /// another waits for.
    pub(crate) running: Vec<Running>,
}

/// Something of the application's that runs.
pub(crate) struct Running {
    pub(crate) callback: Callback,
    /// The jobs that it waits for.
    pub(crate) awaits: Vec<u64>,
}

impl Running {
    /// The stream whose host function it is.
    pub(crate) fn stream(&self) -> Option<u64> {
        match self.callback {
            Callback::HostFunction(stream) => Some(stream),
            Callback::Destructor => None,
        }
    }
}

impl Thread {
    /// Notes that it runs something of the application's.
    pub(crate) fn run(&mut self, callback: Callback) {
        self.running.push(Running { callback, awaits: Vec::new() });
    }
}

/// What a thread runs in which no call may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Callback {
    /// A host function of a stream's.
    HostFunction(u64),
    /// The destructor of a user object.
    Destructor,
}

/// The drivers that know of this thread, and are to forget it when it ends.
struct Known(RefCell<Vec<Weak<Shared>>>);

thread_local! {
    static KNOWN: Known = const { Known(RefCell::new(Vec::new())) };
}

impl Drop for Known {
    fn drop(&mut self) {
        let id = std::thread::current().id();
        for shared in self.0.take().iter().filter_map(Weak::upgrade) {
            // In a forked child another thread may have held the lock, which then stays so.
            if !shared.is_forked() {
                shared.lock().forget_thread(id);
                shared.changed.notify_all();
            }
        }
    }
}

/// Notes that this thread made a call. One that is ending already is forgotten with the driver.
pub(crate) fn meet(shared: &Arc<Shared>, state: &mut State, id: ThreadId) {
    if state.threads.contains_key(&id) {
        return;
    }
    state.threads.insert(id, Thread::default());
    let _ = KNOWN.try_with(|known| {
        let mut known = known.0.borrow_mut();
        known.retain(|other| other.strong_count() > 0);
        known.push(Arc::downgrade(shared));
    });
}

impl State {
    pub(crate) fn thread(&mut self, id: ThreadId) -> &mut Thread {
        self.threads.entry(id).or_default()
    }

    /// Forgets a thread that ended, and its default streams once they have done their work.
    fn forget_thread(&mut self, id: ThreadId) {
        self.threads.remove(&id);
        let streams: Vec<u64> =
            self.contexts.values_mut().filter_map(|context| context.per_thread.remove(&id)).collect();
        for stream in streams {
            self.retire_stream(stream);
        }
    }
}
