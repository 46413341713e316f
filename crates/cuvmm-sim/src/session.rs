//! One call in progress: the lock it holds, and the pointers it was given.
//!
//! # Safety
//! The pointers of a call are wrapped where it enters, by its caller's promise; from there on they are only written
//! and read as what they were declared to be.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, MutexGuard};
use std::thread::ThreadId;

use cuvmm_driver::{CUresult, Call};

use crate::latency::Pause;
use crate::simulator::Shared;
use crate::state::State;
use crate::stream;
use crate::work::Work;

/// What a call's work comes to.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// A call in progress, on the thread that made it.
pub(crate) struct Session<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) call: Call,
    pub(crate) thread: ThreadId,
    /// How long the call is to take, where that is modelled.
    pub(crate) pause: Option<Pause>,
    state: Option<MutexGuard<'a, State>>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(shared: &'a Arc<Shared>, call: Call, state: MutexGuard<'a, State>) -> Self {
        let pause = shared.machine.latency.map(|_| Pause::new());
        Self { shared, call, thread: std::thread::current().id(), pause, state: Some(state) }
    }

    /// Notes that something undefined was done.
    pub(crate) fn violation(&mut self, text: impl Into<String>) {
        let call = self.call;
        self.note(call, text.into());
    }

    /// Waits for jobs, until none of what `awaited` names is left.
    pub(crate) fn wait_until_ended(&mut self, awaited: impl Fn(&State) -> Vec<u64>) {
        loop {
            match awaited(self) {
                left if left.is_empty() => return,
                left => self.advance(&left),
            }
        }
    }

    /// Brings jobs nearer to their end: by doing what can start of them and of those that they come after, where streams
    /// are stepped by hand, and else by letting others in.
    pub(crate) fn advance(&mut self, awaited: &[u64]) {
        let mut is_nearer = false;
        if self.shared.machine.manual_streams {
            // What they come after only ever gets less, but by what host functions wait for, which the next look sees.
            let reach = self.reach(awaited);
            while let Some((stream, number, work)) = self.take_within(&reach) {
                self.perform(stream, number, &work);
                is_nearer = true;
            }
        }
        if !is_nearer {
            self.wait_once();
        }
    }

    /// Does a job that this thread took.
    pub(crate) fn perform(&mut self, stream: u64, number: u64, work: &Work) {
        if let Some(state) = self.state.take() {
            self.state = Some(stream::perform(self.shared, state, stream, number, work));
        }
    }

    /// Lets others in until something changed.
    pub(crate) fn wait_once(&mut self) {
        if let Some(state) = self.state.take() {
            self.state = Some(self.shared.wait(state));
        }
    }
}

impl Deref for Session<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        match &self.state {
            Some(state) => state,
            None => unreachable!("a session gives the lock away only while it waits"),
        }
    }
}

impl DerefMut for Session<'_> {
    fn deref_mut(&mut self) -> &mut State {
        match &mut self.state {
            Some(state) => state,
            None => unreachable!("a session gives the lock away only while it waits"),
        }
    }
}

/// Where a call is to write a `T`: null, or valid for that while the call runs.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// `pointer` is null or valid for writing a `T` as long as this lives. Without room for one, as where what is
    /// written follows from other arguments, `T` is `c_void` or `c_char`.
    pub(crate) unsafe fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// Writes what `make` makes; 1 where there is nowhere to write, before anything is made.
    pub(crate) fn give(self, make: impl FnOnce() -> Answer<T>) -> Answer {
        self.required()?;
        self.put(make()?);
        Ok(())
    }

    /// 1 where there is nowhere to write.
    pub(crate) fn required(&self) -> Answer {
        if self.is_null() { Err(CUresult::INVALID_VALUE) } else { Ok(()) }
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes `value` if there is somewhere to write.
    pub(crate) fn put(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so valid for writes as `new` was promised; C callers may not have aligned it.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// The same pointer, to be read.
    ///
    /// # Safety
    /// It is null, or what the call reads is there.
    pub(crate) unsafe fn as_input(&self) -> In<T> {
        In(self.0.cast_const())
    }
}

impl Out<c_void> {
    /// An output that is known to be a `T` by the call's other arguments.
    ///
    /// # Safety
    /// It is null or valid for writing a `T`.
    pub(crate) unsafe fn of<T>(self) -> Out<T> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes as much of `text` as fits in `length` bytes, with its NUL.
    ///
    /// # Safety
    /// It is null or valid for writing `length` bytes.
    pub(crate) unsafe fn text(self, text: &str, length: i32) -> Answer {
        let room = usize::try_from(length).unwrap_or(0);
        if self.0.is_null() || room == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let bytes = text.bytes().take(room - 1).chain([0]);
        for (index, byte) in bytes.enumerate() {
            // SAFETY: the caller has room for `length` bytes, and no more are written.
            unsafe { self.0.wrapping_add(index).cast::<u8>().write(byte) };
        }
        Ok(())
    }
}

/// What a call is to read: null, or a `T` while the call runs.
pub(crate) struct In<T>(*const T);

impl<T> In<T> {
    /// # Safety
    /// `pointer` is null or valid for reading a `T` as long as this lives, or the start of a C string where `T` is
    /// `c_char`. Where the call's other arguments say how many there are, or of what type, nothing but
    /// [`all`](Self::all) reads it.
    pub(crate) unsafe fn new(pointer: *const T) -> Self {
        Self(pointer)
    }

    /// 1 for null.
    pub(crate) fn required(&self) -> Answer {
        if self.0.is_null() { Err(CUresult::INVALID_VALUE) } else { Ok(()) }
    }
}

impl In<c_char> {
    /// Whether a text is `known`, of which no more is read than is alike. The text of a call ends in NUL.
    pub(crate) fn is_text(&self, known: &CStr) -> bool {
        // SAFETY: the caller's text goes on up to its NUL, and is read up to there or to the first difference.
        let read = |index| unsafe { self.0.wrapping_add(index).cast::<u8>().read() };
        !self.0.is_null() && known.to_bytes_with_nul().iter().enumerate().all(|(index, &byte)| read(index) == byte)
    }

    /// The C string; 1 for null. Asked of what the call's caller made a C string.
    pub(crate) fn text(&self) -> Answer<&CStr> {
        self.required()?;
        // SAFETY: not null, so a C string as long as this lives, as `new` was promised.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}

impl<T: Copy> In<T> {
    /// The value; 1 for null.
    pub(crate) fn read(&self) -> Answer<T> {
        self.required()?;
        // SAFETY: not null, so valid for reads as `new` was promised; C callers may not have aligned it.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// All of `count`; 1 for null, unless there are none.
    ///
    /// # Safety
    /// It is null or valid for reading that many.
    pub(crate) unsafe fn all(&self, count: usize) -> Answer<Vec<T>> {
        if count > 0 {
            self.required()?;
        }
        // SAFETY: not null, and the caller vouches for that many; C callers may not have aligned them.
        let read = |index| unsafe { self.0.wrapping_add(index).read_unaligned() };
        Ok((0..count).map(read).collect())
    }
}

impl In<c_void> {
    /// An input that is known to begin with a `T`.
    ///
    /// # Safety
    /// It is null or valid for reading a `T`.
    pub(crate) unsafe fn of<T>(self) -> In<T> {
        In(self.0.cast())
    }
}

impl In<*mut c_void> {
    /// The values that as many pointers lead to, of 4 or 8 bytes each; 1 where there is none.
    ///
    /// # Safety
    /// It is null or valid for reading that many pointers, each null or valid for reading a value of its width.
    pub(crate) unsafe fn values(&self, widths: &[usize]) -> Answer<Vec<u64>> {
        // SAFETY: the caller vouches for the pointers.
        let pointers = unsafe { self.all(widths.len()) }?;
        let value = |(pointer, &width): (*mut c_void, &usize)| match width {
            // SAFETY: the caller vouches for the value.
            4 => unsafe { In::<u32>::new(pointer.cast_const().cast()) }.read().map(u64::from),
            // SAFETY: as above.
            _ => unsafe { In::<u64>::new(pointer.cast_const().cast()) }.read(),
        };
        pointers.into_iter().zip(widths).map(value).collect()
    }
}
