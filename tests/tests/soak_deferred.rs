//! A long run of allocate, grow and close with deferred release beside kernels that run all the while: nothing piles up, and
//! nothing gets slower.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::CUdeviceptr;
use cuvmm::{OnDrop, Options, Release, StreamRef, VirtualMemoryResource};
use cuvmm_sim::Live;
use cuvmm_tests::{Backend, G, Peer, Spin, Stream, drain, open_files, queue_fill_at};

cuvmm_tests::suite!(nothing_piles_up_and_nothing_gets_slower);

/// How many rounds there are on a simulator and on a GPU. A number in this variable replaces them.
const ROUNDS: (usize, usize) = (3_000, 100_000);
const ROUNDS_VARIABLE: &str = "CUVMM_ROUNDS";
/// How what is printed begins, and how many lines it has.
const TITLE: &str = "deferred release";
const LINES: usize = 5;
/// Over how many rounds the median is taken, at the beginning and at the end.
const PART: usize = 1_000;
/// How many buffers may be pending: memory is bounded.
const PENDING: usize = 64;
/// How many bytes are written to each.
const WRITTEN: usize = 4096;
/// How long each kernel runs.
const KERNEL: Duration = Duration::from_micros(100);
/// How many of them are queued at once on a stream.
const QUEUED: usize = 16;

/// What is there at one moment.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    live: Live,
    files: usize,
}

impl Sample {
    /// What is there when nothing is pending.
    fn take(backend: &Backend, resource: &VirtualMemoryResource) -> Self {
        drain(resource);
        Self { live: backend.ledger.live(), files: open_files().len() }
    }
}

/// The median, the 99th of a hundred and the longest.
struct Figures([Duration; 3]);

impl Figures {
    fn of(times: &[Duration]) -> Self {
        let mut times = times.to_vec();
        times.sort_unstable();
        Self([times.len() / 2, times.len() * 99 / 100, times.len() - 1].map(|index| times[index]))
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, late, longest] = self.0.map(|time| time.as_secs_f64() * 1e6);
        write!(f, "median {median:.1} us, 99% {late:.1} us, longest {longest:.1} us")
    }
}

/// Keeps kernels running on the streams until told to stop, and says how many ran.
fn keep_running(spin: &Spin, stream: &StreamRef, is_over: &AtomicBool) -> usize {
    let mut ran = 0;
    while !is_over.load(Ordering::Relaxed) {
        (0..QUEUED).for_each(|_| spin.queue(stream, CUdeviceptr(0), KERNEL));
        stream.synchronize().unwrap();
        ran += QUEUED;
    }
    ran
}

/// Tells the kernels' threads to stop when dropped, also by a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn nothing_piles_up_and_nothing_gets_slower(backend: &Backend) {
    // In a process of its own, in which nothing else opens files.
    if Peer::role().is_some() {
        return soak(backend);
    }
    let said = Peer::start(backend, "soak").join_early();
    let begin = said.find(TITLE).unwrap_or_else(|| panic!("no figures:\n{said}"));
    let figures: Vec<&str> = said[begin..].lines().take(LINES).collect();
    println!("{}", figures.join("\n"));
    if let Some(dir) = std::env::var_os(cuvmm_tests::conformance::REPORT) {
        let path = std::path::Path::new(&dir).join(format!("soak-{:?}.txt", backend.kind));
        std::fs::write(path, figures.join("\n") + "\n").unwrap();
    }
}

fn soak(backend: &Backend) {
    let rounds = if backend.is_gpu() { ROUNDS.1 } else { ROUNDS.0 };
    let rounds = std::env::var(ROUNDS_VARIABLE).map_or(rounds, |number| number.parse().expect("a number of rounds"));
    let spin = Spin::load(&backend.device);
    let streams = [(); 2].map(|()| Stream::non_blocking(&backend.device));
    let release = Stream::non_blocking(&backend.device);
    let options = Options::new().on_drop(OnDrop::Defer).release(Release::Stream(release.clone()));
    let resource = backend.resource_with(options);
    let (is_over, kernels) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut times = Vec::with_capacity(rounds);
    let mut samples = Vec::new();
    let mut most_pending = 0;
    let begin = Instant::now();
    thread::scope(|scope| {
        for stream in &streams {
            scope.spawn(|| kernels.fetch_add(keep_running(&spin, stream, &is_over), Ordering::Relaxed));
        }
        let _over = Over(&is_over);
        for round in 0..rounds {
            let start = Instant::now();
            let buffer = resource.allocate(G).unwrap();
            let grown = buffer.grow(2 * G).unwrap();
            let made = start.elapsed();
            queue_fill_at(&backend.driver, &release, grown.address(), WRITTEN, round as u8);
            let start = Instant::now();
            drop(buffer);
            grown.close_deferred();
            times.push(made + start.elapsed());
            most_pending = most_pending.max(resource.pending());
            if resource.pending() >= PENDING {
                drain(&resource);
            }
            if round % (rounds / 20).max(1) == 0 {
                samples.push(Sample::take(backend, &resource));
            }
        }
        samples.push(Sample::take(backend, &resource));
    });
    let (took, kernels) = (begin.elapsed(), kernels.load(Ordering::Relaxed));
    let (first, last) = (Figures::of(&times[..PART.min(rounds)]), Figures::of(&times[rounds.saturating_sub(PART)..]));
    let took = took.as_secs_f64();
    println!("{TITLE}: {rounds} rounds of allocate, grow and close beside {kernels} kernels, {took:.1} s");
    println!("the first {PART}: {first}\nthe last {PART}: {last}\nno more than {most_pending} pending");
    println!("alive, and files open, at {} moments: {:?}", samples.len(), samples[0]);
    // The reaper's thread and the streams are there by the first of them.
    for sample in &samples {
        assert_eq!(*sample, samples[0]);
    }
    assert!(kernels > 0 && most_pending <= PENDING + 2);
    assert_eq!(resource.statistics().stranded, 0);
    for stream in streams.iter().chain([&release]) {
        stream.synchronize().unwrap();
    }
    if backend.is_gpu() {
        assert!(last.0[0] <= 2 * first.0[0], "slower: {first}, then {last}");
    }
}
