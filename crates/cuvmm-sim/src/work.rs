//! What streams do: copies, sets, host functions, kernels, graphs. Addresses are looked up when the work starts, and by
//! kernels as they go.
//!
//! # Safety
//! Host pointers are valid by the promise of whoever submitted the work: a call with a host destination returns
//! after it was written, and host sources are copied when the call is made. In captured work both are only noted:
//! they are read and written when the graph runs, and their validity until then is the promise of who launches it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::CUhostFn;

use crate::kernels::{Site, Task};
use crate::memory::Memory;
use crate::session::Answer;
use crate::simulator::Shared;
use crate::state::{Segment, State};
use crate::thread::Callback;
use crate::user_object::Object;

/// Work, by address.
#[derive(Clone)]
pub(crate) enum Work {
    Copy { to: Place, from: Place, bytes: usize },
    Fill { to: u64, device: i32, pattern: Arc<[u8]>, bytes: usize },
    Host(HostCall),
    Kernel(Launch),
    Wait { number: u64 },
    Mark,
    Graph(Run),
}

/// The most bytes of a set that go along with the command; a kernel does larger ones.
const SENT_WITH_SETS: usize = 4 << 10;
/// The most bytes of a copy from the host that are taken at once, and not as the stream gets to them.
const TAKEN_AT_ONCE: usize = 2 << 20;

/// One launch of a kernel.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) task: Task,
    /// The device that it runs on.
    pub(crate) device: i32,
    /// The module that it is of.
    pub(crate) module: u64,
}

/// One launch of a graph.
#[derive(Clone)]
pub(crate) struct Run {
    /// Its work, in an order that keeps its dependencies.
    pub(crate) work: Arc<[Work]>,
    /// What is kept alive until it has ended.
    pub(crate) _objects: Arc<[Arc<Object>]>,
    /// The launch that it comes after.
    pub(crate) after: Option<u64>,
}

/// One side of a copy.
#[derive(Clone)]
pub(crate) enum Place {
    /// An address, as `device` sees it.
    Device {
        address: u64,
        device: i32,
    },
    Host(HostPointer),
    Bytes(Arc<[u8]>),
}

/// A pointer of the host's.
#[derive(Clone, Copy)]
pub(crate) struct HostPointer(pub(crate) *mut u8);

// SAFETY: who submitted it promised that it is valid until the work is done, on whatever thread that is.
unsafe impl Send for HostPointer {}
// SAFETY: as above; a shared reference gives no more than a copy.
unsafe impl Sync for HostPointer {}

impl HostPointer {
    /// A copy of what is there.
    ///
    /// # Safety
    /// `bytes` bytes are valid for reads.
    unsafe fn snapshot(self, bytes: usize) -> Arc<[u8]> {
        let mut copy = vec![0_u8; bytes];
        // SAFETY: the caller vouches for the source; the buffer is ours and has that many bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.0, copy.as_mut_ptr(), bytes) };
        copy.into()
    }
}

impl Place {
    /// The place with its bytes in hand, if it is the host's: so that the caller may reuse them.
    pub(crate) fn taken(self, bytes: usize) -> Self {
        match self {
            // SAFETY: the caller of the copy gave a source of that many bytes.
            Self::Host(pointer) => Self::Bytes(unsafe { pointer.snapshot(bytes) }),
            other => other,
        }
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self, Self::Host(_))
    }
}

/// A host function with what it is given.
#[derive(Clone, Copy)]
pub(crate) struct HostCall {
    pub(crate) function: CUhostFn,
    pub(crate) data: *mut c_void,
}

// SAFETY: who queued it promised that it may be called with that, on a thread of the driver's.
unsafe impl Send for HostCall {}
// SAFETY: as above.
unsafe impl Sync for HostCall {}

const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<HostPointer>();
    is_send_and_sync::<HostCall>();
};

impl HostCall {
    pub(crate) fn call(self) {
        if let Some(function) = self.function {
            // SAFETY: who queued the function promised that it may be called with this.
            unsafe { function(self.data) };
        }
    }
}

/// Work, by what its addresses led to when it started.
pub(crate) enum Ready {
    Nothing,
    Kernel(Launch),
    Copy { to: Vec<Piece>, from: Vec<Piece> },
    Fill { to: Vec<Segment>, pattern: Arc<[u8]> },
    Host(HostCall),
    Many(Vec<Self>),
}

/// A piece of one side of a copy.
pub(crate) struct Piece {
    bytes: usize,
    what: What,
}

enum What {
    Memory(Arc<Memory>, usize),
    Pointer(HostPointer),
    Bytes(Arc<[u8]>),
}

impl Work {
    /// The device addresses that it uses.
    pub(crate) fn spans(&self) -> Vec<(u64, u64)> {
        let span = |address: u64, bytes: usize| (address, address.saturating_add(bytes as u64));
        match self {
            Self::Copy { to, from, bytes } => [to, from]
                .into_iter()
                .filter_map(|place| match place {
                    Place::Device { address, .. } => Some(span(*address, *bytes)),
                    _ => None,
                })
                .collect(),
            Self::Fill { to, bytes, .. } => vec![span(*to, *bytes)],
            Self::Kernel(launch) => launch.task.spans(),
            Self::Graph(run) => run.work.iter().flat_map(Self::spans).collect(),
            Self::Host(_) | Self::Wait { .. } | Self::Mark => Vec::new(),
        }
    }

    /// The job that has to end before this starts, whatever stream that is on.
    pub(crate) fn after(&self) -> Option<u64> {
        match self {
            Self::Wait { number } => Some(*number),
            Self::Graph(run) => run.after,
            _ => None,
        }
    }

    /// Whether the call that queues it returns after it was done: where the host is to have the bytes, or to give more
    /// than are taken at once.
    pub(crate) fn is_waited_for(&self) -> bool {
        match self {
            Self::Copy { to, from, bytes } => to.is_host() || (from.is_host() && *bytes > TAKEN_AT_ONCE),
            _ => false,
        }
    }

    /// Whether it runs a function of such a module.
    pub(crate) fn runs(&self, such: &impl Fn(u64) -> bool) -> bool {
        match self {
            Self::Kernel(launch) => such(launch.module),
            Self::Graph(run) => run.work.iter().any(|work| work.runs(such)),
            _ => false,
        }
    }

    /// Looks its addresses up. What is unmapped by now breaks the context, in which nothing runs any more.
    pub(crate) fn prepare(&self, state: &mut State, stream: u64) -> Ready {
        let Some(context) = state.streams.get(&stream).map(|stream| stream.context) else { return Ready::Nothing };
        if state.contexts.get(&context).is_none_or(|context| context.error.is_some()) {
            return Ready::Nothing;
        }
        let ready = self.resolve(state).unwrap_or_else(|code| {
            state.break_contexts(code);
            Ready::Nothing
        });
        if ready.calls_host() {
            state.thread(std::thread::current().id()).run(Callback::HostFunction(stream));
        }
        ready
    }

    /// Refuses work on memory that may not be used so now. Sets go no further than one mapping where the host was granted
    /// any of it.
    pub(crate) fn refuse_unusable(&self, state: &State) -> Answer {
        let is_set = matches!(self, Self::Fill { .. });
        if is_set && self.spans().into_iter().any(|(start, end)| state.is_cut_for_host(start, end)) {
            return Err(CUresult::INVALID_VALUE);
        }
        self.resolve(state).map(|_| ()).map_err(|_| CUresult::INVALID_VALUE)
    }

    fn resolve(&self, state: &State) -> Answer<Ready> {
        let failure = self.failure();
        Ok(match self {
            Self::Copy { to, from, bytes } => Ready::Copy {
                to: pieces(state, to, *bytes, true).ok_or(failure)?,
                from: pieces(state, from, *bytes, false).ok_or(failure)?,
            },
            Self::Fill { to, device, pattern, bytes } => {
                let to = state.segments(*to, *bytes, *device, true).ok_or(failure)?;
                Ready::Fill { to, pattern: pattern.clone() }
            }
            Self::Host(call) => Ready::Host(*call),
            Self::Kernel(launch) => Ready::Kernel(*launch),
            Self::Graph(run) => Ready::Many(run.work.iter().map(|work| work.resolve(state)).collect::<Answer<_>>()?),
            Self::Wait { .. } | Self::Mark => Ready::Nothing,
        })
    }

    /// What breaks a context whose memory is not there for this work: an illegal address where a kernel or a copy engine
    /// looks for it, a failed launch where the bytes go along with the command.
    fn failure(&self) -> CUresult {
        match self {
            Self::Fill { bytes, .. } if *bytes <= SENT_WITH_SETS => CUresult::LAUNCH_FAILED,
            Self::Copy { from: Place::Host(_) | Place::Bytes(_), .. } => CUresult::LAUNCH_FAILED,
            _ => CUresult::ILLEGAL_ADDRESS,
        }
    }
}

fn pieces(state: &State, place: &Place, bytes: usize, write: bool) -> Option<Vec<Piece>> {
    let one = |what| Some(vec![Piece { bytes, what }]);
    match place {
        Place::Device { address, device } => {
            let segments = state.segments(*address, bytes, *device, write)?;
            let piece =
                |segment: Segment| Piece { bytes: segment.bytes, what: What::Memory(segment.memory, segment.offset) };
            Some(segments.into_iter().map(piece).collect())
        }
        Place::Host(pointer) => one(What::Pointer(*pointer)),
        Place::Bytes(copy) => one(What::Bytes(copy.clone())),
    }
}

impl Ready {
    fn calls_host(&self) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Many(work) => work.iter().any(Self::calls_host),
            _ => false,
        }
    }

    /// Does it, for a context. No lock is held.
    pub(crate) fn run(self, shared: &Shared, context: u64) -> Answer {
        match self {
            Self::Nothing => {}
            Self::Kernel(Launch { task, device, .. }) => return Site { shared, context, device }.run(task),
            Self::Copy { to, from } => copy(&to, &from),
            Self::Fill { to, pattern } => {
                let mut at = 0;
                for segment in to {
                    // A segment may begin in the middle of an element.
                    let turned: Vec<u8> = (0..pattern.len()).map(|i| pattern[(at + i) % pattern.len()]).collect();
                    segment.memory.fill(segment.offset, &turned, segment.bytes);
                    at += segment.bytes;
                }
            }
            Self::Host(call) => call.call(),
            Self::Many(work) => return work.into_iter().try_for_each(|work| work.run(shared, context)),
        }
        Ok(())
    }
}

/// Copies pieces to pieces of the same length in all.
fn copy(to: &[Piece], from: &[Piece]) {
    let (mut to, mut from) = (to.iter(), from.iter());
    let (mut target, mut source) = (to.next(), from.next());
    let (mut written, mut read) = (0, 0);
    while let (Some(into), Some(out)) = (target, source) {
        let part = (into.bytes - written).min(out.bytes - read);
        copy_part(&into.what, written, &out.what, read, part);
        written += part;
        read += part;
        if written == into.bytes {
            (target, written) = (to.next(), 0);
        }
        if read == out.bytes {
            (source, read) = (from.next(), 0);
        }
    }
}

fn copy_part(to: &What, written: usize, from: &What, read: usize, bytes: usize) {
    let source = match from {
        What::Memory(..) => None,
        What::Pointer(pointer) => Some(pointer.0.wrapping_add(read).cast_const()),
        What::Bytes(copy) => Some(copy.as_ptr().wrapping_add(read)),
    };
    match (to, from, source) {
        (What::Memory(memory, offset), What::Memory(other, at), _) => {
            memory.copy_from(offset + written, other, at + read, bytes);
        }
        (What::Memory(memory, offset), _, Some(source)) => {
            // SAFETY: the source was promised, or is a copy of ours, for the whole length.
            unsafe { memory.write(offset + written, source, bytes) };
        }
        (What::Pointer(pointer), What::Memory(memory, at), _) => {
            // SAFETY: the destination was promised for the whole length.
            unsafe { memory.read(at + read, pointer.0.wrapping_add(written), bytes) };
        }
        (What::Pointer(pointer), _, Some(source)) => {
            // SAFETY: both were promised for the whole length, and may overlap.
            unsafe { std::ptr::copy(source, pointer.0.wrapping_add(written), bytes) };
        }
        _ => {}
    }
}
