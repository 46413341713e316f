//! [`Threads`]: work that may take as long as somebody else likes, done aside.
//!
//! There are at most [`MOST`] threads for it, however much of it comes: what they don't get to waits, and so it may for
//! good where each of them was given what never ends. Whoever leaves work to them waits for nothing. A thread ends when
//! nothing is left.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use cuvmm_driver::OfProcess;

/// More than one, so that one that takes long holds nothing up.
const MOST: usize = 8;

type Work = Box<dyn FnOnce() + Send>;

/// The threads for one kind of work.
#[derive(Default)]
pub(crate) struct Threads(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    threads: usize,
}

impl Threads {
    /// Leaves `work` to the threads of this process. Where there are none, and none can be had, it is done here.
    pub(crate) fn leave(of: &OfProcess<Self>, work: impl FnOnce() + Send + 'static) {
        of.get_or_make(Self::default).push(Box::new(work));
    }

    fn push(&'static self, work: Work) {
        let mut queue = self.lock();
        queue.waiting.push_back(work);
        if queue.threads == MOST {
            return;
        }
        queue.threads += 1;
        drop(queue);
        if let Err(error) = thread::Builder::new().name("cuvmm-close".to_owned()).spawn(|| self.serve()) {
            self.do_without(&error);
        }
    }

    /// Leaves it to the threads that there are, of which none ends while anything waits; else does it here.
    fn do_without(&self, error: &io::Error) {
        let mut queue = self.lock();
        let has_others = queue.threads > 1;
        queue.threads -= usize::from(has_others);
        drop(queue);
        // A subscriber that panics leaves the work undone, and nobody else to do it.
        let warn = || tracing::warn!(%error, "no thread to close a peer's files, or to release memory outside of a host function");
        catch_unwind(AssertUnwindSafe(warn)).unwrap_or_else(std::mem::forget);
        if !has_others {
            self.serve();
        }
    }

    /// Does what waits until nothing does.
    fn serve(&self) {
        while let Some(work) = self.next() {
            // What panics may be a subscriber, and so may what it panicked with.
            catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(std::mem::forget);
        }
    }

    /// What has waited longest; none where the thread is to end.
    fn next(&self) -> Option<Work> {
        let mut queue = self.lock();
        let work = queue.waiting.pop_front();
        if work.is_none() {
            queue.threads -= 1;
        }
        work
    }

    /// Held for a moment each time.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier, mpsc};

    use super::*;

    #[test]
    fn work_that_does_not_end_takes_no_more_than_so_many_threads_and_the_rest_waits() {
        static THREADS: OfProcess<Threads> = OfProcess::new();
        let threads = THREADS.get_or_make(Threads::default);
        let gate = Arc::new(Barrier::new(MOST + 1));
        let (begins, begun) = mpsc::channel();
        for _ in 0..MOST {
            let (gate, begins) = (Arc::clone(&gate), begins.clone());
            Threads::leave(&THREADS, move || {
                begins.send(()).unwrap();
                gate.wait();
            });
        }
        (0..MOST).for_each(|_| begun.recv().unwrap());
        let (ends, ended) = mpsc::channel();
        for number in 0..100 {
            let ends = ends.clone();
            Threads::leave(&THREADS, move || ends.send(number).unwrap());
        }
        let queue = threads.lock();
        assert_eq!((queue.threads, queue.waiting.len()), (MOST, 100));
        drop(queue);
        assert!(ended.try_recv().is_err());
        gate.wait();
        let mut numbers: Vec<i32> = (0..100).map(|_| ended.recv().unwrap()).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..100));
        while threads.lock().threads > 0 {
            thread::yield_now();
        }
    }

    #[test]
    fn where_no_thread_can_be_had_those_that_there_are_do_it_and_else_who_leaves_it() {
        static THREADS: OfProcess<Threads> = OfProcess::new();
        let threads = THREADS.get_or_make(Threads::default);
        let error = io::Error::from(io::ErrorKind::WouldBlock);
        let leave = |done: mpsc::Sender<thread::ThreadId>| {
            let mut queue = threads.lock();
            queue.waiting.push_back(Box::new(move || done.send(thread::current().id()).unwrap()));
            queue.threads += 1;
            drop(queue);
            threads.do_without(&error);
        };
        let (ends, ended) = mpsc::channel();
        leave(ends.clone());
        assert_eq!((ended.try_recv(), threads.lock().threads), (Ok(thread::current().id()), 0));
        let (opens, opened) = mpsc::channel::<()>();
        Threads::leave(&THREADS, move || opened.recv().unwrap());
        leave(ends);
        assert_eq!((ended.try_recv(), threads.lock().threads), (Err(mpsc::TryRecvError::Empty), 1));
        opens.send(()).unwrap();
        assert_ne!(ended.recv().unwrap(), thread::current().id());
    }

    #[test]
    fn work_that_panics_ends_no_thread_before_its_time() {
        static THREADS: OfProcess<Threads> = OfProcess::new();
        let (ends, ended) = mpsc::channel();
        for number in 0..20 {
            let ends = ends.clone();
            Threads::leave(&THREADS, move || {
                // Unlike panic!, it calls no hook that prints.
                if number % 2 == 0 {
                    std::panic::resume_unwind(Box::new(number));
                }
                ends.send(number).unwrap();
            });
        }
        (0..10).for_each(|_| assert_eq!(ended.recv().unwrap() % 2, 1));
        while THREADS.get().unwrap().lock().threads > 0 {
            thread::yield_now();
        }
    }
}
