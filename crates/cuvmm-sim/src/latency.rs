//! [`Latency`]: how long the calls take that change memory, as was measured.

use std::time::{Duration, Instant};

use crate::session::Session;

const MIB: f64 = 1_048_576.0;
/// How long the last part of a pause is waited for awake, as the kernel doesn't wake anybody to the microsecond.
const AWAKE: Duration = Duration::from_micros(200);

/// What was measured: MiB, and microseconds.
type Curve = &'static [(f64, f64)];

/// How long a driver's calls take, for [`Machine::latency`](crate::Machine::latency): of a machine with one H200, or
/// with two.
///
/// Reserving, making, mapping, granting, unmapping, giving back, exporting and importing take at least what they took
/// there, by size and by number of mappings and devices, while no other call of the same driver gets on. All else
/// takes what it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    reserve: f64,
    create: Curve,
    map: Curve,
    access_by_one: Curve,
    access_by_two: Curve,
    /// Where nothing changes.
    same_access: f64,
    unmap: Curve,
    give_back: Curve,
    export: f64,
    import: f64,
    /// For a GiB of the host's memory.
    host_create: f64,
    host_access: f64,
    /// What every grant takes, at least, for a while after memory was given back.
    disturbed_access: f64,
    /// How long that while is for each GiB.
    disturbance: f64,
}

/// A part of what a call does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Work {
    Reserve,
    Create {
        bytes: u64,
        host: bool,
    },
    Map {
        bytes: u64,
    },
    /// Of one mapping, to so many devices: none where nothing changes.
    Grant {
        bytes: u64,
        host: bool,
        devices: usize,
    },
    /// Of one mapping.
    Unmap {
        bytes: u64,
    },
    /// Of memory that nobody has any more.
    GiveBack {
        bytes: u64,
    },
    Export,
    Import,
}

impl Latency {
    /// A machine with one H200.
    pub fn h200() -> Self {
        Self {
            reserve: 2.0,
            create: &[(2.0, 10.0), (64.0, 11.0), (256.0, 12.0), (1024.0, 117.0), (4096.0, 357.0), (16384.0, 970.0)],
            map: &[(2.0, 1.3), (64.0, 1.4), (256.0, 1.3), (1024.0, 2.3), (4096.0, 3.0), (16384.0, 3.9)],
            access_by_one: &[
                (2.0, 31.0),
                (64.0, 31.0),
                (256.0, 47.0),
                (1024.0, 85.0),
                (4096.0, 192.0),
                (16384.0, 472.0),
            ],
            access_by_two: &[
                (2.0, 52.0),
                (64.0, 56.0),
                (256.0, 115.0),
                (1024.0, 109.0),
                (4096.0, 190.0),
                (16384.0, 726.0),
            ],
            same_access: 0.1,
            unmap: &[(2.0, 27.0), (64.0, 17.0), (256.0, 18.0), (1024.0, 35.0), (4096.0, 65.0), (16384.0, 158.0)],
            give_back: &[(2.0, 15.0), (64.0, 67.0), (256.0, 223.0), (1024.0, 607.0), (16384.0, 11600.0)],
            export: 40.0,
            import: 32.0,
            host_create: 229_000.0,
            host_access: 39_000.0,
            disturbed_access: 0.0,
            disturbance: 0.0,
        }
    }

    /// A machine with two H200s that reach each other: after memory was given back, every grant takes a millisecond
    /// for a while.
    pub fn h200_pair() -> Self {
        Self { disturbed_access: 1000.0, disturbance: 3000.0, ..Self::h200() }
    }

    /// How long that takes by itself.
    pub(crate) fn of(&self, work: Work) -> Duration {
        micros(match work {
            Work::Reserve => self.reserve,
            Work::Create { bytes, host: true } => self.host_create * gib(bytes),
            Work::Create { bytes, host: false } => at(self.create, bytes),
            Work::Map { bytes } => at(self.map, bytes),
            Work::Grant { devices: 0, .. } => self.same_access,
            Work::Grant { bytes, host: true, .. } => self.host_access * gib(bytes),
            Work::Grant { bytes, host: false, devices } => {
                let (one, two) = (at(self.access_by_one, bytes), at(self.access_by_two, bytes));
                // Each further one as the second, though two can cost less than one where they were measured.
                one + (devices - 1) as f64 * (two - one)
            }
            Work::Unmap { bytes } => at(self.unmap, bytes),
            Work::GiveBack { bytes } => at(self.give_back, bytes),
            Work::Export => self.export,
            Work::Import => self.import,
        })
    }

    /// How long grants are slow after so much was given back.
    fn disturbance(&self, bytes: u64) -> Duration {
        micros(self.disturbance * gib(bytes))
    }

    /// The least that a grant takes meanwhile.
    fn disturbed_access(&self) -> Duration {
        micros(self.disturbed_access)
    }
}

fn micros(micros: f64) -> Duration {
    Duration::from_secs_f64(micros / 1e6)
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / MIB / 1024.0
}

/// The value of a curve: straight between the sizes that were measured, that of the least below it, and behind the
/// last as steep as before.
fn at(curve: Curve, bytes: u64) -> f64 {
    let size = bytes as f64 / MIB;
    let mut value = 0.0;
    for pair in curve.windows(2) {
        let &[(from, low), (to, high)] = pair else { continue };
        if size > from || value == 0.0 {
            value = low + f64::max(size - from, 0.0) * (high - low) / (to - from);
        }
    }
    value
}

/// What the calls so far leave to later ones.
#[derive(Debug, Default)]
pub(crate) struct Aftermath {
    /// Memory that was given back since the last call.
    pub(crate) given_back: Vec<u64>,
    /// Until when grants are slow.
    disturbed_until: Option<Instant>,
}

/// How long a call is to take.
#[derive(Debug)]
pub(crate) struct Pause {
    since: Instant,
    length: Duration,
    grants: bool,
}

impl Pause {
    pub(crate) fn new() -> Self {
        Self { since: Instant::now(), length: Duration::ZERO, grants: false }
    }

    pub(crate) fn add(&mut self, latency: &Latency, work: Work) {
        self.length += latency.of(work);
        self.grants |= matches!(work, Work::Grant { .. });
    }
}

impl Aftermath {
    /// The whole length of a call at `now`, with what it gave back, and with what others gave back before.
    fn settle(&mut self, latency: &Latency, pause: &Pause, now: Instant) -> Duration {
        let disturbed = pause.grants && self.disturbed_until.is_some_and(|until| now < until);
        let least = if disturbed { latency.disturbed_access() } else { Duration::ZERO };
        let mut length = pause.length.max(least);
        for bytes in self.given_back.drain(..) {
            length += latency.of(Work::GiveBack { bytes });
            let from = self.disturbed_until.map_or(now, |until| until.max(now));
            self.disturbed_until = Some(from + latency.disturbance(bytes));
        }
        length
    }
}

impl Session<'_> {
    /// Counts a part of what this call does.
    pub(crate) fn takes(&mut self, work: Work) {
        if let (Some(latency), Some(pause)) = (&self.shared.machine.latency, &mut self.pause) {
            pause.add(latency, work);
        }
    }

    /// Lets the time go by that this call takes, and nobody else in.
    pub(crate) fn let_time_go_by(&mut self) {
        let shared = self.shared;
        let (Some(latency), Some(pause)) = (&shared.machine.latency, self.pause.take()) else { return };
        let end = pause.since + self.aftermath.settle(latency, &pause, Instant::now());
        if let Some(rest) = end.saturating_duration_since(Instant::now()).checked_sub(AWAKE) {
            std::thread::sleep(rest);
        }
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    }
}
