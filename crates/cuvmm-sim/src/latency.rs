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
/// there, by size and by number of mappings and devices, one after the other whatever threads they are made on. All
/// else takes what it takes, also meanwhile.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use cuvmm_driver::sys::*;
/// use cuvmm_sim::{Latency, Machine, Simulator};
///
/// let driver = Simulator::new(Machine::h200().latency(Latency::h200())).driver()?;
/// let properties = CUmemAllocationProp::pinned(CUmemLocation::device(0), CUmemAllocationHandleType::NONE);
/// let start = Instant::now();
/// driver.mem_create(1 << 30, &properties)?;
/// assert!(start.elapsed() > Duration::from_micros(100));
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
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
                // Each further one as the second, which can cost less than nothing where they were measured.
                f64::max(one + (devices - 1) as f64 * (two - one), 0.0)
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
}

/// What the calls so far leave to later ones.
#[derive(Debug)]
pub(crate) struct Aftermath {
    latency: Latency,
    /// What giving memory back takes, of which no call was told.
    due: Duration,
    /// How long it disturbs others, likewise.
    disturbance: Duration,
    /// Until when grants are slow.
    disturbed_until: Option<Instant>,
    /// Until when the driver is taken by the calls so far.
    taken_until: Option<Instant>,
}

impl Aftermath {
    pub(crate) fn new(latency: Latency) -> Self {
        Self { latency, due: Duration::ZERO, disturbance: Duration::ZERO, disturbed_until: None, taken_until: None }
    }

    /// Notes that nobody has so many bytes any more.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.due += self.latency.of(Work::GiveBack { bytes });
        self.disturbance += self.latency.disturbance(bytes);
    }

    /// The whole length of a call that ends at `now`: with what it gave back, and what others did before.
    fn settle(&mut self, pause: &Pause, now: Instant) -> Duration {
        let disturbed = pause.grants && self.disturbed_until.is_some_and(|until| now < until);
        let length = if disturbed { pause.length.max(self.latency.disturbed_access()) } else { pause.length };
        let disturbance = std::mem::take(&mut self.disturbance);
        if !disturbance.is_zero() {
            self.disturbed_until = Some(self.disturbed_until.map_or(now, |until| until.max(now)) + disturbance);
        }
        length + std::mem::take(&mut self.due)
    }

    /// When a call may return that ends at `now`: one that takes time is served after those before it.
    fn end(&mut self, pause: &Pause, now: Instant) -> Instant {
        let length = self.settle(pause, now);
        if length.is_zero() {
            return pause.since;
        }
        let end = self.taken_until.map_or(pause.since, |until| until.max(pause.since)) + length;
        self.taken_until = Some(end);
        end
    }
}

impl Session<'_> {
    /// Counts a part of what this call does.
    pub(crate) fn takes(&mut self, work: Work) {
        if let (Some(latency), Some(pause)) = (&self.shared.machine.latency, &mut self.pause) {
            pause.length += latency.of(work);
            pause.grants |= matches!(work, Work::Grant { .. });
        }
    }

    /// When this call, which has done its work, is to return; none where its time is not modelled.
    pub(crate) fn end(&mut self) -> Option<Instant> {
        let pause = self.pause.take()?;
        self.aftermath.as_mut().map(|aftermath| aftermath.end(&pause, Instant::now()))
    }
}

/// Lets the time go by until then. Nobody's lock is held meanwhile.
pub(crate) fn wait_until(end: Instant) {
    if let Some(rest) = end.saturating_duration_since(Instant::now()).checked_sub(AWAKE) {
        std::thread::sleep(rest);
    }
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn micros(latency: Latency, work: Work) -> f64 {
        latency.of(work).as_nanos() as f64 / 1000.0
    }

    #[test]
    fn what_was_measured_is_taken_and_what_is_between_lies_between() {
        let grant = |bytes, devices| Work::Grant { bytes, host: false, devices };
        let table = [
            (Work::Reserve, 2.0),
            (Work::Create { bytes: 2 * MIB, host: false }, 10.0),
            (Work::Create { bytes: 64 << 10, host: false }, 10.0),
            (Work::Create { bytes: 16 * GIB, host: false }, 970.0),
            (Work::Create { bytes: GIB, host: true }, 229_000.0),
            (Work::Map { bytes: GIB }, 2.3),
            (grant(2 * MIB, 1), 31.0),
            (grant(640 * MIB, 1), 66.0),
            (grant(2 * MIB, 2), 52.0),
            (grant(2 * MIB, 3), 73.0),
            (grant(16 * GIB, 2), 726.0),
            (grant(4 * GIB, 2), 190.0),
            (grant(4 * GIB, 1000), 0.0),
            (grant(GIB, 0), 0.1),
            (Work::Grant { bytes: GIB / 2, host: true, devices: 1 }, 19_500.0),
            (Work::Unmap { bytes: 2 * MIB }, 27.0),
            (Work::Unmap { bytes: 33 * MIB }, 22.0),
            (Work::GiveBack { bytes: 256 * MIB }, 223.0),
            (Work::GiveBack { bytes: 16 * GIB }, 11_600.0),
            (Work::Export, 40.0),
            (Work::Import, 32.0),
        ];
        for (work, expected) in table {
            assert!((micros(Latency::h200(), work) - expected).abs() < 0.01, "{work:?}");
            assert_eq!(Latency::h200().of(work), Latency::h200_pair().of(work), "{work:?}");
        }
    }

    #[test]
    fn behind_the_last_size_that_was_measured_it_goes_on_as_steeply() {
        // 15 to 23 ms were measured.
        let release = micros(Latency::h200(), Work::GiveBack { bytes: 32 * GIB });
        assert!((15_000.0..24_000.0).contains(&release), "{release}");
    }

    #[test]
    fn on_a_pair_grants_are_slow_for_a_while_after_memory_was_given_back() {
        let (slow, quick) = (Duration::from_micros(1000), Duration::from_micros(31));
        for (latency, expected) in [(Latency::h200(), quick), (Latency::h200_pair(), slow)] {
            let now = Instant::now();
            let call = |grants, length| Pause { since: now, length, grants };
            let mut aftermath = Aftermath::new(latency);
            assert_eq!(aftermath.settle(&call(true, quick), now), quick, "nothing was given back");
            aftermath.add(GIB);
            assert_eq!(aftermath.settle(&call(false, Duration::ZERO), now), Duration::from_micros(607));
            let within = now + Duration::from_micros(2900);
            assert_eq!(aftermath.settle(&call(true, quick), within), expected);
            assert_eq!(aftermath.settle(&call(true, 2 * slow), within), 2 * slow, "not less than by itself");
            assert_eq!(aftermath.settle(&call(false, quick), within), quick, "no other calls");
            assert_eq!(aftermath.settle(&call(true, quick), now + Duration::from_micros(3100)), quick, "it is over");
        }
    }

    #[test]
    fn what_is_given_back_meanwhile_adds_to_the_while() {
        let now = Instant::now();
        let grant = || Pause { since: now, length: Duration::ZERO, grants: true };
        let mut aftermath = Aftermath::new(Latency::h200_pair());
        aftermath.add(GIB);
        aftermath.settle(&grant(), now);
        aftermath.add(GIB);
        aftermath.settle(&grant(), now + Duration::from_millis(1));
        let slow = Duration::from_micros(1000);
        assert_eq!(aftermath.settle(&grant(), now + Duration::from_millis(5)), slow);
        assert_eq!(aftermath.settle(&grant(), now + Duration::from_millis(7)), Duration::ZERO);
    }

    #[test]
    fn calls_that_take_time_take_it_one_after_the_other_and_others_do_not_wait() {
        let now = Instant::now();
        let call = |micros| Pause { since: now, length: Duration::from_micros(micros), grants: false };
        let mut aftermath = Aftermath::new(Latency::h200());
        assert_eq!(aftermath.end(&call(30), now), now + Duration::from_micros(30));
        assert_eq!(aftermath.end(&call(0), now), now);
        assert_eq!(aftermath.end(&call(20), now), now + Duration::from_micros(50));
        let later = now + Duration::from_micros(70);
        assert_eq!(aftermath.end(&Pause { since: later, ..call(5) }, later), later + Duration::from_micros(5));
    }
}
