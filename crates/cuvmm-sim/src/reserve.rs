//! Reserving and freeing addresses.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::CUdeviceptr;

use crate::latency::Work;
use crate::machine::Hints;
use crate::session::{Answer, Session};
use crate::space::Range;
use crate::state::Reservation;

/// The most that one reservation can have.
const MOST: u64 = 1 << 46;
/// Where the addresses of a process end. A hint at what lies behind is no wish that could be granted elsewhere.
const END: u64 = 1 << 47;
/// Behind this no hint is granted: somewhere there the main thread's stack grows down, into whatever is below it.
const STACK: u64 = END - (64 << 30);
/// What is smaller is made in an arena, where a driver has such: 24 MiB was, 26 were not.
const LEAST_OUTSIDE_ARENAS: u64 = 26 << 20;

pub(crate) fn reserve(
    session: &mut Session<'_>,
    size: usize,
    alignment: usize,
    hint: CUdeviceptr,
    flags: u64,
) -> Answer<CUdeviceptr> {
    let unit = session.shared.machine.address_unit() as u64;
    let (bytes, asked) = (size as u64, alignment as u64);
    let alignment = asked.max(unit);
    let valid = flags == 0
        && bytes > 0
        && bytes.is_multiple_of(unit)
        && (asked == 0 || asked.is_power_of_two())
        && hint.0.is_multiple_of(alignment);
    if !valid {
        return Err(CUresult::INVALID_VALUE);
    }
    if hint.0 != 0 && hint.0.checked_add(bytes).is_none_or(|end| end > END) {
        return Err(CUresult::OUT_OF_MEMORY);
    }
    let window = session.shared.machine.address_window.unwrap_or(u64::MAX);
    if bytes > MOST || session.reserved_bytes.checked_add(bytes).is_none_or(|total| total > window) {
        return Err(CUresult::OUT_OF_MEMORY);
    }
    let range = match (hint.0, habit(session, hint.0, bytes)) {
        (0, _) => session.place(bytes, alignment)?,
        (hint, Hints::Elsewhere) => match session.place(bytes, alignment)? {
            // Held while another place is looked for.
            wished if wished.start() == hint => session.place(bytes, alignment)?,
            place => place,
        },
        (_, Hints::Refused(code)) if !code.is_success() => return Err(code),
        (hint, _) => match Range::at(hint, bytes) {
            Err(_) => session.place(bytes, alignment)?,
            Ok(granted) => granted,
        },
    };
    let start = range.start();
    session.reserved_bytes += bytes;
    session.reservations.insert(start, Reservation { bytes, plain: false, range });
    session.takes(Work::Reserve);
    Ok(CUdeviceptr(start))
}

/// What becomes of a hint for so many bytes.
fn habit(session: &Session<'_>, hint: u64, bytes: u64) -> Hints {
    let has_context = || session.primaries.values().any(|primary| primary.context.is_some());
    let hints = match session.shared.machine.hints {
        Hints::ByPreset => session.policy.hints,
        hints => hints,
    };
    match hints {
        Hints::Granted | Hints::Arenas if hint.saturating_add(bytes) > STACK => Hints::Elsewhere,
        Hints::Arenas if bytes < LEAST_OUTSIDE_ARENAS && has_context() => Hints::Elsewhere,
        hints => hints,
    }
}

pub(crate) fn free(session: &mut Session<'_>, address: CUdeviceptr, size: usize) -> Answer {
    let start = address.0;
    let bytes = size as u64;
    let exact = session.reservations.get(&start).is_some_and(|found| found.bytes == bytes && !found.plain);
    if !exact || session.mappings_over(start, start + bytes).next().is_some() {
        return Err(CUresult::INVALID_VALUE);
    }
    remove(session, start);
    Ok(())
}

/// Gives a reservation's addresses back to the kernel.
pub(crate) fn remove(session: &mut Session<'_>, start: u64) {
    if let Some(Reservation { bytes, plain, range }) = session.reservations.remove(&start) {
        if !plain {
            session.reserved_bytes -= bytes;
        }
        drop(range);
    }
}
