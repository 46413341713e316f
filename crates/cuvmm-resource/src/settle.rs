//! The gate that every path to an unmap passes: waiting, on the host, until no work uses the memory any more.
//!
//! `cuMemUnmap` neither waits nor is ordered after any work; a kernel still running on the addresses then dies. So
//! a buffer waits for its release stream and its fences, also while an alias keeps the memory mapped: when the last alias
//! unmaps, all is settled, and ranges need no lists.

use std::time::{Duration, Instant};

use cuvmm_driver::{Device, Driver};
use cuvmm_handles::PrimaryContext;

use crate::capture::is_over;
use crate::error::Error;
use crate::fence::{Busy, Fence};
use crate::release::{Order, Release};
use crate::stream::StreamRef;
use crate::sync::pause;

/// How long anything waits that nobody gave a deadline: what work takes, as a rule, and not for ever where a stream waits for
/// the very thread.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// What an event takes on a stream that has nothing else to do, which is asked for that long without a pause. A pause takes
/// longer than it is meant to.
const MOMENT: Duration = Duration::from_micros(50);

/// Why a buffer is not settled.
#[derive(Debug)]
pub(crate) enum Unsettled {
    /// Nothing may be released: a stream is capturing, the thread is in a host function, the deadline has passed, or work
    /// could not be waited for and may still be running.
    Refused(Error),
    /// Something failed. Work on the buffer is over or lost all the same, and its memory can go.
    Failed(Error),
}

/// The first failure of those that are gone on past.
#[derive(Clone, Debug, Default)]
pub(crate) struct Noted(Option<Box<cuvmm_driver::Error>>);

impl Noted {
    pub(crate) fn note(&mut self, result: Result<(), cuvmm_driver::Error>) {
        if let Err(error) = result {
            self.0.get_or_insert_with(|| Box::new(error));
        }
    }

    pub(crate) fn get(&self) -> Option<&cuvmm_driver::Error> {
        self.0.as_deref()
    }

    /// A failure that can't be gone on past. The first is told, as ever.
    pub(crate) fn refused(&self, error: cuvmm_driver::Error) -> Unsettled {
        Unsettled::Refused(self.get().cloned().unwrap_or(error).into())
    }

    /// That one, as what all comes to.
    fn settled(self) -> Result<(), Unsettled> {
        self.0.map_or(Ok(()), |error| Err(Unsettled::Failed((*error).into())))
    }
}

/// Pauses between questions whether work is over: short ones at first, ever longer ones as it goes on.
#[derive(Debug)]
pub(crate) struct Pauses(Duration);

impl Pauses {
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(2);

    pub(crate) fn new() -> Self {
        Self(Self::SHORTEST)
    }

    pub(crate) fn next(&mut self) -> Duration {
        let longer = (self.0 * 3 / 2).min(Self::LONGEST);
        std::mem::replace(&mut self.0, longer)
    }
}

impl Order {
    /// Waits for the release stream (`instead`, where one is given) and every fence. Where all went well, the fences
    /// are used up.
    ///
    /// Whether anything is in the way is found out first, for all of them, so that a refusal waits for nothing.
    ///
    /// `by_default` is the device whose default stream is meant where none is named; none where that is no stream's
    /// matter.
    pub(crate) fn settle(
        &mut self,
        driver: &Driver,
        by_default: Option<&Device>,
        instead: Option<&StreamRef>,
    ) -> Result<(), Unsettled> {
        let mut noted = self.noted.clone();
        require_outside(driver, &mut noted)?;
        let named = instead.map(|stream| Release::Stream(stream.clone()));
        let mut release = release_fence(named.as_ref().unwrap_or(&self.release), by_default, &mut noted)?;
        match (&mut release, &mut self.fences[..]) {
            (Some(one), []) | (None, [one]) => one.ask_and_wait(&mut noted)?,
            (release, fences) => {
                for fence in release.iter().chain(&*fences) {
                    fence.require_no_capture(&mut noted)?;
                }
                for fence in release.iter_mut().chain(fences) {
                    fence.wait(&mut noted)?;
                }
            }
        }
        if noted.get().is_none() {
            for fence in self.fences.drain(..) {
                noted.note(fence.end());
            }
        }
        noted.note(release.map_or(Ok(()), Fence::end));
        noted.settled()
    }

    /// As [`settle`](Self::settle), until the deadline: then it is refused. What is over by then is used up, and what went
    /// wrong with it is told by whoever waits for the rest.
    pub(crate) fn settle_by(
        &mut self,
        deadline: Instant,
        driver: &Driver,
        by_default: Option<&Device>,
    ) -> Result<(), Unsettled> {
        let mut noted = std::mem::take(&mut self.noted);
        let waited = self.wait_by(deadline, driver, by_default, &mut noted);
        if waited.is_err() {
            self.noted = noted;
            return waited;
        }
        noted.settled()
    }

    /// What goes wrong beside a refusal is noted.
    fn wait_by(
        &mut self,
        deadline: Instant,
        driver: &Driver,
        by_default: Option<&Device>,
        noted: &mut Noted,
    ) -> Result<(), Unsettled> {
        require_outside(driver, noted)?;
        let mut release = release_fence(&self.release, by_default, noted)?.into_iter().collect();
        let (begin, mut pauses) = (Instant::now(), Pauses::new());
        loop {
            // Both are looked at, so that what is over is used up.
            let mut busy = Busy::default();
            let is_over = [poll(&mut release, noted, &mut busy)?, poll(&mut self.fences, noted, &mut busy)?];
            if is_over == [true; 2] {
                return Ok(());
            }
            if begin.elapsed() < MOMENT {
                std::hint::spin_loop();
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Unsettled::Refused(Error::DeadlinePassed));
            }
            pause(pauses.next().min(left));
        }
    }
}

/// Asks of each whether its work is over, and lets go of those whose work is. Whether none is left.
pub(crate) fn poll(fences: &mut Vec<Fence>, noted: &mut Noted, busy: &mut Busy) -> Result<bool, Unsettled> {
    let mut index = 0;
    while let Some(fence) = fences.get_mut(index) {
        if fence.poll(noted, busy)? {
            noted.note(fences.swap_remove(index).end());
        } else {
            index += 1;
        }
    }
    Ok(fences.is_empty())
}

/// Refuses in a host function of the driver's, by one question that has no effect.
pub(crate) fn require_outside(driver: &Driver, noted: &mut Noted) -> Result<(), Unsettled> {
    match driver.is_in_host_function() {
        Ok(true) => Err(Unsettled::Refused(Error::HostCallback)),
        asked => {
            noted.note(asked.map(drop));
            Ok(())
        }
    }
}

/// The wait for a release stream, where there is one.
pub(crate) fn release_fence(
    release: &Release,
    by_default: Option<&Device>,
    noted: &mut Noted,
) -> Result<Option<Fence>, Unsettled> {
    let stream = match (release, by_default) {
        (Release::Stream(stream), _) if !stream.is_default() => Some(stream.clone()),
        (Release::Stream(_) | Release::DefaultStream, Some(device)) => default_stream(device, noted)?,
        _ => None,
    };
    Ok(stream.map(Fence::whole))
}

/// The default stream of the device's primary context, where that is active: nothing can be queued in one that is not. Where
/// that can't be found out, it may be.
fn default_stream(device: &Device, noted: &mut Noted) -> Result<Option<StreamRef>, Unsettled> {
    match device.primary_ctx_is_active() {
        Ok(false) => return Ok(None),
        asked => noted.note(asked.map(drop)),
    }
    match PrimaryContext::retain(device) {
        Ok(primary) => Ok(Some(StreamRef::legacy_of(primary))),
        Err(error) => {
            if !is_over(error.code()) {
                return Err(noted.refused(error));
            }
            noted.note(Err(error));
            Ok(None)
        }
    }
}
