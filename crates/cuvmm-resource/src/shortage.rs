//! When the device's memory is exhausted: what is told of it, and what may be done about it.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use cuvmm_driver::MemoryInfo;

/// The device, or the host, had not so much memory as was asked of `cuMemCreate`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}, for {requested:#x} bytes at a granularity of {granularity:#x}{}{}", said(*.memory), still(*.pending))]
#[non_exhaustive]
pub struct OutOfMemory {
    /// How many bytes were asked for, rounded up, in one piece.
    pub requested: usize,
    /// The granularity that they were rounded up to, in bytes.
    pub granularity: usize,
    /// How much the device has, and has left, where its primary context is active; a driver tells nobody else. Other
    /// processes move it.
    pub memory: Option<MemoryInfo>,
    /// How many buffers of the resource are gone, and keep memory until their work is over. That was waited for already.
    pub pending: usize,
    /// What the driver answered.
    pub error: cuvmm_driver::Error,
}

fn said(memory: Option<MemoryInfo>) -> String {
    memory.map_or_else(String::new, |memory| format!(", with {:#x} free of {:#x}", memory.free, memory.total))
}

fn still(pending: usize) -> String {
    if pending == 0 { String::new() } else { format!("; buffers that are gone still wait for work: {pending}") }
}

/// The standard library's `Arc` holds it: it is shared, and never contended for.
type Hook = dyn Fn(&OutOfMemory) -> bool + Send + Sync;

/// What is done before an allocation fails for want of memory.
#[derive(Clone, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub(crate) struct Relief {
    #[cfg_attr(
        feature = "serde",
        serde(
            skip_deserializing,
            skip_serializing_if = "Option::is_none",
            serialize_with = "crate::serialized::refuse_hook"
        )
    )]
    hook: Option<Arc<Hook>>,
    times: u32,
    pause: Duration,
}

impl Relief {
    pub(crate) fn set_hook(&mut self, hook: impl Fn(&OutOfMemory) -> bool + Send + Sync + 'static) {
        self.hook = Some(Arc::new(hook));
    }

    pub(crate) fn set_retries(&mut self, times: u32, pause: Duration) {
        (self.times, self.pause) = (times, pause);
    }

    /// Calls the hook once, and says whether to try once more. To be called without a lock: it is anybody's code. Not
    /// from within a hook, which would call itself for as long as there is a stack.
    pub(crate) fn ask(&self, shortage: &OutOfMemory) -> bool {
        let Some(hook) = &self.hook else { return false };
        let Some(_asking) = Asking::begin() else { return false };
        hook(shortage)
    }

    /// Waits before each retry, and says whether there is one, given how many there were.
    pub(crate) fn wait(&self, retries: u32) -> bool {
        let another = retries < self.times;
        if another {
            std::thread::sleep(self.pause);
        }
        another
    }
}

thread_local! {
    /// Whether the thread is inside a hook.
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// The thread inside a hook, also one that panics.
struct Asking;

impl Asking {
    /// None where it is inside of one already.
    fn begin() -> Option<Self> {
        (!IS_ASKING.replace(true)).then_some(Self)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        IS_ASKING.set(false);
    }
}

impl std::fmt::Debug for Relief {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relief")
            .field("hook", &self.hook.is_some())
            .field("times", &self.times)
            .field("pause", &self.pause)
            .finish()
    }
}
