//! Streams that are stepped by hand.

use cuvmm_driver::sys::CUstream;

use crate::machine::Machine;
use crate::simulator::Simulator;
use crate::state::State;
use crate::stream::{self, Kind, Step};
use crate::thread;

impl Machine {
    /// With streams that are stepped by hand: what is queued runs when [`Simulator::step`] or [`Simulator::step_all`]
    /// says so, or when a call waits for it, on the thread that does. So every run of a test has the same order, and a
    /// test chooses what comes between a submission and its run.
    ///
    /// A wait does, in the order of submission, what it waits for and nothing else. A query does nothing: whoever asks
    /// until work is done has to step it. Destructors of user objects have their thread all the same.
    ///
    /// ```
    /// use cuvmm_driver::sys::CUstream;
    /// use cuvmm_sim::{Machine, Simulator};
    ///
    /// let simulator = Simulator::new(Machine::h200().manual_streams());
    /// let driver = simulator.driver()?;
    /// let stream = CUstream::LEGACY;
    /// # let context = driver.device(0)?.primary_ctx_retain()?;
    /// # // SAFETY: the context lives as long as it is current, and so does the memory as long as work uses it.
    /// # unsafe {
    /// # driver.ctx_set_current(context)?;
    /// # let mut address = cuvmm_driver::sys::CUdeviceptr(0);
    /// # assert!(driver.raw().cuMemAlloc(&raw mut address, 4).is_success());
    /// assert!(driver.raw().cuMemsetD8Async(address, 1, 4, stream).is_success());
    /// assert_eq!(simulator.peek(address, 4).unwrap(), [0xA5; 4], "it is queued");
    /// assert!(simulator.step(stream));
    /// assert_eq!(simulator.peek(address, 4).unwrap(), [1; 4]);
    /// assert!(!simulator.step(stream), "that was all");
    /// # }
    /// # Ok::<(), cuvmm_driver::Error>(())
    /// ```
    #[must_use]
    pub fn manual_streams(self) -> Self {
        Self { manual_streams: true, ..self }
    }
}

impl Simulator {
    /// Does the next work of a stream on this thread; whether there was any that could start. A default stream is that
    /// of the current context. Where streams work by themselves, nothing is left to do by hand.
    pub fn step(&self, stream: CUstream) -> bool {
        let thread = std::thread::current().id();
        self.take_and_perform(|state| {
            let id = if stream.is_default_token() {
                let context = state.threads.get(&thread)?.stack.last().copied()?;
                state.default_stream(context, thread, stream)?
            } else {
                let id = stream.0.addr() as u64;
                state.streams.get(&id).filter(|found| found.kind == Kind::Made)?;
                id
            };
            match state.step(id, false) {
                Step::Run(number, work) => Some((id, number, work)),
                Step::Wait | Step::End => None,
            }
        })
    }

    /// Does all that is queued and can start, on this thread and in the order of submission, until nothing is left that
    /// could; how much that was.
    pub fn step_all(&self) -> usize {
        let mut done = 0;
        while self.take_and_perform(State::take_first) {
            done += 1;
        }
        done
    }

    fn take_and_perform(&self, take: impl FnOnce(&mut State) -> Option<(u64, u64, crate::work::Work)>) -> bool {
        let shared = self.shared();
        if !shared.machine.manual_streams || shared.is_forked() {
            return false;
        }
        let mut state = shared.lock();
        let Some((id, number, work)) = take(&mut state) else { return false };
        thread::meet(shared, &mut state, std::thread::current().id());
        drop(stream::perform(shared, state, id, number, &work));
        true
    }
}
