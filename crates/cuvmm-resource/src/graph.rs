//! Memory that belongs to a graph: as long as that can run, what its nodes name is there.
//!
//! A graph's nodes name addresses, and nothing keeps memory there. A user object of the driver's does: a graph has
//! references to it, shares them with all that is made from it, and gives them back after the last run. Ours has a [`Share`]
//! of a buffer's memory.
//!
//! # Safety
//! A share in a box is the user object's from when that is made. The driver calls the destructor once, when the last
//! reference is gone, and that takes the box back.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cuvmm_driver::sys::CUgraph;
use cuvmm_driver::{Driver, StrandedKind};

use crate::buffer::VirtualMemoryBuffer;
use crate::capture::Session;
use crate::error::Error;
use crate::range::Range;
use crate::reaper;
use crate::retired::Retired;
use crate::statistics::Counts;
use crate::stream::StreamRef;
use crate::sync::Arc;

/// What a user object has of a buffer: its memory, and where that is counted.
struct Share {
    driver: Driver,
    counts: Arc<Counts>,
    range: Range,
}

impl VirtualMemoryBuffer {
    /// Makes a graph an owner of this buffer's memory, as the buffer is one: all of its addresses stay mapped until both are
    /// gone. Whatever becomes of the buffer, that the graph's nodes name the addresses that it has now is safe.
    ///
    /// What is made from the graph, executables and clones of it, owns the memory with it, if it is made later. So the memory
    /// goes when the graph, the last of these and their last run are over, or when the buffer closes after that: by a thread
    /// of this library's, and some time later, since drivers tell late and on a thread of their own. Until then
    /// [`Statistics::in_graphs`](crate::Statistics::in_graphs) counts the share. What the buffer grows by later is not in it.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let device = driver.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let graph = driver.graph_create()?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// // Nodes that use the buffer are added here.
    /// // SAFETY: the graph is alive, and this thread's alone.
    /// unsafe { buffer.retain_in_graph(graph)? };
    /// buffer.close()?;
    /// assert_eq!((resource.statistics().in_graphs, simulator.physical_bytes(0)), (1, 2 << 20));
    ///
    /// # // SAFETY: the graph is ours, and nobody uses it any more.
    /// unsafe { driver.graph_destroy(graph)? };
    /// # while resource.statistics().in_graphs > 0 {
    /// #     std::thread::yield_now();
    /// # }
    /// # resource.drain(std::time::Instant::now() + std::time::Duration::from_secs(10))?;
    /// // Soon after:
    /// assert_eq!((resource.statistics().in_graphs, simulator.physical_bytes(0)), (0, 0));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// * `graph` is a graph of this buffer's driver, and is not destroyed before this returns.
    /// * No other thread uses it meanwhile: drivers don't lock graphs.
    ///
    /// # Errors
    /// [`Error::HostCallback`], [`Error::Forked`];
    /// [`Unsupported`](cuvmm_driver::Error::Unsupported) before CUDA 11.3; what the driver answers. The graph is then no owner
    /// to rely on, but may have the memory until it goes.
    #[doc(alias = "cuUserObjectCreate")]
    #[doc(alias = "cuGraphRetainUserObject")]
    pub unsafe fn retain_in_graph(&self, graph: CUgraph) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        self.require_calls()?;
        // SAFETY: the caller vouches for the graph.
        unsafe { self.give_to(graph) }
    }

    /// As [`retain_in_graph`](Self::retain_in_graph), for the graph that `stream` captures into: what is instantiated when
    /// the capture ends owns the memory from its start. The capture goes on as it was.
    ///
    /// A default stream's token means the stream that it names here: that of the calling thread's current context.
    ///
    /// ```
    /// # use cuvmm_driver::sys::CUstreamCaptureMode;
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let device = driver.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let stream = StreamRef::create(&device)?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// // SAFETY: the stream is alive, and the buffer while it is used; then the graph has its memory.
    /// unsafe {
    ///     driver.stream_begin_capture(stream.as_raw(), CUstreamCaptureMode::THREAD_LOCAL)?;
    ///     driver.memset_d8_async(buffer.address(), 7, buffer.size(), stream.as_raw())?;
    ///     buffer.retain_in_capture(&stream)?;
    ///     let graph = driver.stream_end_capture(stream.as_raw())?;
    ///     let executable = driver.graph_instantiate(graph)?;
    ///     driver.graph_destroy(graph)?;
    /// #   let address = buffer.address();
    ///     drop(buffer);
    ///     driver.graph_launch(executable, stream.as_raw())?; // as good as ever
    ///     stream.synchronize()?;
    /// #   assert_eq!(simulator.peek(address, 1), Some(vec![7]));
    /// #   driver.graph_exec_destroy(executable)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// * Until this returns, the capture does not end.
    /// * No other thread adds to it meanwhile, or uses its graph: drivers don't lock graphs.
    ///
    /// # Errors
    /// As [`retain_in_graph`](Self::retain_in_graph); [`Error::NotCapturing`], also for a capture that can't end well any
    /// more; a stream of another driver.
    #[doc(alias = "cuStreamGetCaptureInfo")]
    pub unsafe fn retain_in_capture(&self, stream: &StreamRef) -> Result<(), Error> {
        self.driver().require_same(stream.driver())?;
        if self.is_empty() {
            return Ok(());
        }
        self.require_calls()?;
        let session = Session::require(stream.target())?;
        let graph = session.captured_graph()?;
        session.leave()?;
        // SAFETY: the stream's capture, which has the graph, does not end: the caller vouches for it, and for other threads.
        unsafe { self.give_to(graph.ok_or(Error::NotCapturing)?) }
    }

    /// Refuses where no call can be made.
    fn require_calls(&self) -> Result<(), Error> {
        self.resource().require_own_process()?;
        if self.driver().is_in_host_function()? { Err(Error::HostCallback) } else { Ok(()) }
    }

    /// Gives a graph a reference to a user object that has a share of the memory.
    ///
    /// It is a reference of the graph's own, and ours is given back whatever came of that: so it does not matter whether a
    /// call that failed took effect. A reference that is moved nobody knows the owner of then.
    ///
    /// # Safety
    /// The graph is alive and of this driver, and no other thread uses it.
    unsafe fn give_to(&self, graph: CUgraph) -> Result<(), Error> {
        let (driver, counts) = (self.driver(), self.resource.counts());
        let share = Share { driver: driver.clone(), counts: Arc::clone(counts), range: self.range().clone() };
        let share = Box::into_raw(Box::new(share)).cast::<c_void>();
        // SAFETY: the destructor takes the box that was made for it, on whatever thread: a share is Send. It makes no call
        // of the driver, and does not unwind.
        let object = match unsafe { driver.user_object_create(share, Some(end), 1) } {
            Ok(object) => object,
            Err(error) => {
                // SAFETY: no user object has it. The buffer has all that it shares: no call is made.
                drop(unsafe { Box::from_raw(share.cast::<Share>()) });
                return Err(error.into());
            }
        };
        counts.add_in_graph();
        // SAFETY: the caller vouches for the graph, and the object's reference is ours.
        let retained = unsafe { driver.graph_retain_user_object(graph, object, 1) };
        // SAFETY: it is the reference that the object was made with, and given back once.
        let released = unsafe { driver.user_object_release(object, 1) };
        if let Err(error) = &released
            && !error.is_shut_down()
        {
            counts.add_stranded();
            driver.strand(StrandedKind::Buffer, error, "memory that was to be a graph's is kept");
        }
        Ok(retained.and(released)?)
    }
}

impl Share {
    /// Leaves the memory to the reaper. Nothing uses it on its behalf any more.
    fn hand_over(self) {
        // It counts as pending before it does not count as a graph's any more: whoever waits for both misses nothing.
        let retired = Retired::of_graph(self.driver, Arc::clone(&self.counts), self.range);
        self.counts.remove_in_graph();
        reaper::hand_over(retired);
    }
}

/// A share may end on any thread.
const _: () = {
    const fn any_thread<T: Send>() {}
    any_thread::<Share>();
};

/// The destructor of a user object.
///
/// # Safety
/// It is called once, with a boxed share.
unsafe extern "C" fn end(share: *mut c_void) {
    // SAFETY: the caller's promise.
    let share = unsafe { Box::from_raw(share.cast::<Share>()) };
    if share.driver.is_forked() {
        std::mem::forget(share);
        return;
    }
    // The driver's code does not unwind. What panics may be a subscriber, and so may what it panicked with.
    catch_unwind(AssertUnwindSafe(|| share.hand_over())).unwrap_or_else(std::mem::forget);
}
