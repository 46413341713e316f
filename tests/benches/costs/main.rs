//! What buffers cost beside the driver's calls alone: subjects of one case are timed in turn, in one process, so that what
//! else happens on the machine happens to all. On the simulator, or on a GPU with `CUVMM_DRIVER=cuda`.
//!
//! ```text
//! cargo bench -p cuvmm-tests --bench costs -- [--json FILE] [CASE...]
//! ```
//!
//! Cases are chosen by what their names begin with: all of them where none is named. Times are in microseconds.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the program is its own")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark stops at what it did not expect"
)]

mod churn;
mod curve;
mod paths;
mod rows;
mod share;

use std::fs::File;
use std::time::{Duration, Instant};

use cuvmm::{Device, Options, Release, StreamRef, VirtualMemoryResource};
use cuvmm_tests::benched_driver;

use crate::rows::Rows;

/// How long a host of several GPUs may take, after memory was released, until access to other memory is granted as fast as
/// before.
const SETTLES_A_GIB: Duration = Duration::from_millis(4);

/// Where it is measured.
struct Bench {
    device: Device,
    /// A stream that everything is ordered on.
    stream: StreamRef,
    wanted: Vec<String>,
    rows: Rows,
}

impl Bench {
    fn wants(&self, case: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| case.starts_with(wanted.as_str()))
    }

    /// Resources with those options, whose buffers end after the stream's work.
    fn resource(&self, options: Options) -> VirtualMemoryResource {
        let release = Release::Stream(self.stream.clone());
        VirtualMemoryResource::new(&self.device, options.release(release)).unwrap()
    }
}

fn main() {
    if share::is_receiver() {
        return share::take_all();
    }
    let mut arguments = std::env::args().skip(1);
    let (mut json, mut wanted) = (None, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = Some(arguments.next().expect("a file behind --json")),
            // So cargo calls benchmarks.
            "--bench" => {}
            // So it asks for tests, of which there are none.
            "--test" | "--list" => return,
            case => wanted.push(case.to_owned()),
        }
    }
    // It is tried before anything is measured, which takes long; what is in it stays until there is something else.
    if let Some(path) = &json {
        let opened = File::options().create(true).append(true).open(path);
        opened.unwrap_or_else(|error| panic!("can't write {path}: {error}"));
    }
    let driver = benched_driver();
    let device = driver.device(0).unwrap();
    let stream = StreamRef::create(&device).unwrap();
    let rows = Rows::on(&device);
    let mut bench = Bench { device, stream, wanted, rows };
    paths::run(&mut bench);
    share::run(&mut bench);
    curve::run(&mut bench);
    churn::run(&mut bench);
    if let Some(path) = json {
        std::fs::write(&path, bench.rows.json()).unwrap();
    }
    for wanted in &bench.wanted {
        assert!(bench.rows.has_any(wanted), "no case begins with {wanted}");
    }
}

/// How long it takes, and what it made.
fn timed<T>(make: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let made = std::hint::black_box(make());
    (start.elapsed(), made)
}

/// Waits until nothing is felt any more of so much memory that was released. It does not sleep: what a processor takes to get
/// going again is nobody's cost.
fn settle(bytes: usize) {
    let (begin, time) = (Instant::now(), SETTLES_A_GIB * u32::try_from(bytes >> 20).unwrap() / 1024);
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}
