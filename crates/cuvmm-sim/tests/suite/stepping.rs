//! Streams that are stepped by hand: the order is the test's.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, Preset, kernels};

use crate::common::{Gpu, UNIT};

const NON_BLOCKING: CUstream_flags = CUstream_flags::NON_BLOCKING;

fn both() -> [Gpu; 2] {
    [Preset::Strict, Preset::Measured]
        .map(|preset| Gpu::new(Machine::h200().preset(preset).manual_streams()).with_context())
}

/// What host functions wrote down.
#[derive(Clone, Default)]
struct Order(Arc<Mutex<Vec<u32>>>);

impl Order {
    fn queue(&self, gpu: &Gpu, stream: CUstream, number: u32) {
        let order = self.clone();
        assert_eq!(gpu.host(stream, move || order.0.lock().unwrap().push(number)), 0);
    }

    fn taken(&self) -> Vec<u32> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[test]
fn nothing_runs_until_it_is_stepped() {
    for gpu in both() {
        let (stream, other, order) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), Order::default());
        for (stream, number) in [(stream, 1), (other, 2), (stream, 3)] {
            order.queue(&gpu, stream, number);
        }
        assert_eq!([gpu.query(stream), gpu.query(other)], [600, 600]);
        assert!(gpu.simulator.step(other));
        assert!(!gpu.simulator.step(other), "there is no more");
        assert_eq!(order.taken(), [2]);
        assert_eq!([gpu.query(stream), gpu.query(other)], [600, 0]);
        assert!(gpu.simulator.step(stream) && gpu.simulator.step(stream));
        assert_eq!(order.taken(), [1, 3]);
        assert_eq!(gpu.query(stream), 0);
    }
}

#[test]
fn all_is_stepped_in_the_order_of_submission() {
    for gpu in both() {
        let (stream, other, order) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), Order::default());
        for (stream, number) in [(other, 1), (stream, 2), (other, 3), (CUstream::LEGACY, 4)] {
            order.queue(&gpu, stream, number);
        }
        assert_eq!(gpu.simulator.step_all(), 4);
        assert_eq!(order.taken(), [1, 2, 3, 4]);
        assert_eq!(gpu.simulator.step_all(), 0);
    }
}

#[test]
fn a_wait_does_what_it_waits_for_and_nothing_else() {
    for gpu in both() {
        let (stream, other, third) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (event, order) = (gpu.event(), Order::default());
        order.queue(&gpu, third, 1);
        order.queue(&gpu, other, 2);
        assert_eq!([gpu.record(event, other), gpu.wait_event(stream, event)], [0, 0]);
        order.queue(&gpu, other, 3);
        order.queue(&gpu, stream, 4);
        assert!(!gpu.simulator.step(stream), "what its event waits for comes first");
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(order.taken(), [2, 4]);
        assert_eq!(gpu.event_synchronize(event), 0);
        // SAFETY: it takes nothing.
        assert_eq!(unsafe { gpu.raw().cuCtxSynchronize() }.0, 0);
        assert_eq!(order.taken(), [1, 3], "all of the context");
    }
}

#[test]
fn a_blocking_copy_comes_after_the_blocking_streams() {
    for gpu in both() {
        let (blocking, other) = (gpu.stream(CUstream_flags::DEFAULT), gpu.stream(NON_BLOCKING));
        let (buffer, order) = (gpu.buffer(UNIT), Order::default());
        order.queue(&gpu, other, 1);
        order.queue(&gpu, blocking, 2);
        assert_eq!(gpu.fill(buffer.address, 5, 4, blocking), 0);
        assert_eq!(gpu.read(buffer.address, 4).unwrap(), [5; 4]);
        assert_eq!(order.taken(), [2], "and not after the others");
        assert_eq!(gpu.write(buffer.address, &[6; 4]), 0);
        assert_eq!(gpu.simulator.peek(CUdeviceptr(buffer.address), 4).unwrap(), [6; 4]);
    }
}

#[test]
fn an_unmap_comes_between_a_submission_and_its_run() {
    for gpu in both() {
        let (stream, buffer) = (gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
        assert_eq!(gpu.fill(buffer.address, 1, 4, stream), 0);
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        assert_eq!(gpu.violations(), ["cuMemUnmap: unmap under queued work"]);
        assert!(gpu.simulator.step(stream));
        assert_eq!(gpu.query(stream), 719);
    }
}

#[test]
fn an_unmap_comes_after_the_run() {
    for gpu in both() {
        let (stream, buffer) = (gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
        assert_eq!(gpu.fill(buffer.address, 1, 4, stream), 0);
        assert!(gpu.simulator.step(stream));
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn kernels_graphs_and_default_streams_are_stepped_too() {
    for gpu in both() {
        let (fill, buffer) = (gpu.kernel(kernels::FILL), gpu.buffer(UNIT));
        for stream in [CUstream::LEGACY, CUstream::PER_THREAD] {
            assert!(!gpu.simulator.step(stream), "nobody used it yet");
            assert_eq!(gpu.run(fill, stream, &[buffer.address, stream.0.addr() as u64, 1]), 0);
            assert!(gpu.simulator.step(stream));
            assert_eq!(gpu.word(buffer.address), stream.0.addr() as u32);
        }
        let stream = gpu.stream(NON_BLOCKING);
        assert_eq!(gpu.begin(stream, CUstreamCaptureMode::GLOBAL), 0);
        assert_eq!(gpu.run(fill, stream, &[buffer.address, 9, 1]), 0);
        let executable = gpu.instantiate(gpu.end(stream).unwrap());
        assert_eq!(gpu.launch(executable, stream), 0);
        assert_eq!(gpu.word(buffer.address), 2);
        assert!(gpu.simulator.step(stream));
        assert_eq!(gpu.word(buffer.address), 9);
    }
}

#[test]
fn a_destroyed_stream_still_does_its_work() {
    for gpu in both() {
        let (stream, order) = (gpu.stream(NON_BLOCKING), Order::default());
        order.queue(&gpu, stream, 1);
        assert_eq!(gpu.destroy(stream), 0);
        assert_eq!(gpu.simulator.step_all(), 1);
        assert_eq!(order.taken(), [1]);
    }
}

#[test]
fn a_host_function_may_wait_for_another_stream() {
    for gpu in both() {
        let (stream, other, order) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), Order::default());
        let (driver, inner) = (gpu.driver.clone(), order.clone());
        assert_eq!(
            gpu.host(stream, move || {
                // SAFETY: the stream is alive.
                let code = unsafe { driver.raw().cuStreamSynchronize(other) };
                inner.0.lock().unwrap().push(code.0);
                // SAFETY: numbers.
                let code = unsafe { driver.raw().cuMemUnmap(CUdeviceptr(0), 0) };
                inner.0.lock().unwrap().push(code.0);
            }),
            0
        );
        order.queue(&gpu, other, 1);
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(order.taken(), [1, 0, 800], "and it is still one when that is done");
        assert_eq!(gpu.unmap(0, 0), 1, "out of it");
    }
}

#[test]
fn a_host_function_that_another_waits_for_may_not_wait_for_that() {
    for gpu in both() {
        let (stream, other, codes) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), Order::default());
        let wait = |on| {
            let (driver, codes) = (gpu.driver.clone(), codes.clone());
            move || {
                // SAFETY: the stream is alive.
                let code = unsafe { driver.raw().cuStreamSynchronize(on) };
                codes.0.lock().unwrap().push(code.0);
            }
        };
        assert_eq!([gpu.host(stream, wait(other)), gpu.host(other, wait(stream))], [0, 0]);
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(codes.taken(), [800, 0], "the inner one would wait for ever");

        let simulator = gpu.simulator.clone();
        assert_eq!(gpu.host(stream, move || assert!(simulator.step(other))), 0);
        assert_eq!(gpu.host(other, wait(stream)), 0);
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(codes.taken(), [800], "whoever steps it");
    }
}

#[test]
fn thousands_of_jobs_are_waited_for_and_stepped_in_a_moment() {
    const JOBS: usize = 4000;
    for gpu in both() {
        let (blocking, other, order) =
            (gpu.stream(CUstream_flags::DEFAULT), gpu.stream(NON_BLOCKING), Order::default());
        let queue = || {
            for number in 0..JOBS as u32 {
                order.queue(&gpu, [blocking, other, CUstream::LEGACY][number as usize % 3], number);
            }
        };
        let begin = Instant::now();
        queue();
        assert_eq!([gpu.synchronize(CUstream::LEGACY), gpu.synchronize(other)], [0, 0]);
        assert_eq!(order.taken().len(), JOBS);
        queue();
        assert_eq!(gpu.simulator.step_all(), JOBS);
        assert!(order.taken().is_sorted());
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }
}

#[test]
fn waiting_for_a_whole_context_takes_no_longer_than_its_work() {
    const JOBS: usize = 50_000;
    let gpu = Gpu::new(Machine::h200().manual_streams()).with_context();
    let streams: Vec<CUstream> = (0..500).map(|_| gpu.stream(NON_BLOCKING)).collect();
    let order = Order::default();
    let queue = |streams: &[CUstream]| {
        for number in 0..JOBS {
            order.queue(&gpu, streams[number % streams.len()], number as u32);
        }
    };
    let begin = Instant::now();
    queue(&streams[..1]);
    let mut plain = CUdeviceptr(0);
    // SAFETY: the place is a local's.
    assert!(unsafe { gpu.raw().cuMemAlloc(&raw mut plain, 1) }.is_success());
    // SAFETY: it was made just now, and nothing uses it.
    assert!(unsafe { gpu.raw().cuMemFree(plain) }.is_success());
    assert_eq!(order.taken().len(), JOBS);
    queue(&streams);
    // SAFETY: it takes no arguments.
    assert!(unsafe { gpu.raw().cuCtxSynchronize() }.is_success());
    assert!(order.taken().is_sorted());
    queue(&streams[..1]);
    // SAFETY: nothing of the context's is used any more.
    assert!(unsafe { gpu.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }.is_success());
    assert_eq!(order.taken().len(), JOBS);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn waits_of_two_threads_share_the_work() {
    for gpu in both() {
        let (stream, order) = (gpu.stream(NON_BLOCKING), Order::default());
        for number in 0..64 {
            order.queue(&gpu, stream, number);
        }
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| assert_eq!(gpu.synchronize(stream), 0));
            }
        });
        assert_eq!(order.taken(), (0..64).collect::<Vec<_>>());
    }
}

#[test]
fn streams_that_work_by_themselves_are_not_stepped() {
    let gpu = Gpu::strict().with_context();
    let stream = gpu.stream(NON_BLOCKING);
    let gate = gpu.hold(stream);
    assert_eq!(gpu.fill(gpu.buffer(UNIT).address, 1, 1, stream), 0);
    assert!(!gpu.simulator.step(stream) && gpu.simulator.step_all() == 0);
    gate.open();
    assert_eq!(gpu.synchronize(stream), 0);
}
