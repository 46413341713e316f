//! What must hold, and whether it does: decided of the rows alone.

use super::rows::{
    BY_CHUNKS, BY_SIZE, CHUNKS, CURVE, Growth, OWN, OWN_CHUNKS, OWN_CHURN, Row, SIZES, find_whole, numbers_of_gpus,
};

/// An operation may take this many times as long as the driver's calls, or [`SPARE`] longer.
const OPERATION: f64 = 1.03;
/// So may one that shares memory.
const SHARING: f64 = 1.05;
const SPARE: f64 = 1.0;
/// How many times faster the curve is to be than by copying.
const FASTER: f64 = 1000.0;
/// How many times the quiet median steps under churn may take, with recycling, on a host of two GPUs: half of them, and 99 %.
const CHURNED: [f64; 2] = [1.5, 10.0];
/// How many times the cost of one chunk's each of many may have, or each operation on a buffer that has many.
const FLAT: f64 = 1.5;
const CURVE_BYTES: u64 = 63 << 30;

/// One thing that must hold.
#[derive(Debug, PartialEq)]
pub(crate) struct Judged {
    pub(crate) case: String,
    pub(crate) what: String,
    pub(crate) measured: String,
    pub(crate) bound: String,
    /// Nothing where it was not measured.
    pub(crate) is_held: Option<bool>,
}

impl Judged {
    pub(crate) fn word(&self) -> &'static str {
        match self.is_held {
            Some(true) => "held",
            Some(false) => "**missed**",
            None => "not measured",
        }
    }
}

/// All of it, of our own cost.
pub(crate) fn own(rows: &[Row]) -> Vec<Judged> {
    let judge = |(name, growth): (&str, Growth)| {
        let [first, last] = [OWN_CHUNKS[0], OWN_CHUNKS[OWN_CHUNKS.len() - 1]].map(|chunks| {
            let each = if growth == Growth::Flat { 1.0 } else { f64::from(chunks) };
            find_whole(rows, 0, &format!("{name}/{chunks}"), "cuvmm").map(|row| row.p50 / each)
        });
        let what = match growth {
            Growth::Flat => "10,000 chunks against 1",
            Growth::ByChunk => "each of 10,000 chunks against 1 alone",
        };
        ratio(name, what, last, first, FLAT, 0.0)
    };
    OWN.into_iter().map(judge).collect()
}

/// All of it, of the hosts with so many GPUs.
pub(crate) fn on_gpus(rows: &[Row], gpus: u32) -> Vec<Judged> {
    let mut judged = Vec::new();
    for name in BY_SIZE {
        judged.extend(SIZES.map(|mib| operation(rows, gpus, format!("{name}/{mib}"), OPERATION)));
    }
    for name in BY_CHUNKS {
        judged.extend(CHUNKS.map(|chunks| operation(rows, gpus, format!("{name}/{chunks}"), SHARING)));
    }
    judged.extend(curve(rows, gpus));
    if gpus > 1 {
        let churned = find_whole(rows, gpus, OWN_CHURN, "cuvmm-recycling");
        let quiet = find_whole(rows, gpus, OWN_CHURN, "quiet").map(|row| row.p50);
        let [p50, p99] = [churned.map(|row| row.p50), churned.map(|row| row.p99)];
        judged.push(ratio(OWN_CHURN, "p50 with recycling against the quiet p50", p50, quiet, CHURNED[0], 0.0));
        judged.push(ratio(OWN_CHURN, "p99 with recycling against the quiet p50", p99, quiet, CHURNED[1], 0.0));
    }
    judged
}

/// All of it.
pub(crate) fn all(rows: &[Row]) -> Vec<(u32, Judged)> {
    let on_gpus = numbers_of_gpus(rows)
        .into_iter()
        .flat_map(|gpus| on_gpus(rows, gpus).into_iter().map(move |judged| (gpus, judged)));
    on_gpus.chain(own(rows).into_iter().map(|judged| (0, judged))).collect()
}

fn operation(rows: &[Row], gpus: u32, case: String, bound: f64) -> Judged {
    let [ours, raw] = ["cuvmm", "raw"].map(|subject| find_whole(rows, gpus, &case, subject).map(|row| row.p50));
    ratio(&case, "p50 against raw calls", ours, raw, bound, SPARE)
}

fn curve(rows: &[Row], gpus: u32) -> [Judged; 3] {
    let [ours, raw, copy] = ["cuvmm", "raw", "copy"].map(|subject| find_whole(rows, gpus, CURVE, subject));
    let total = |row: Option<&Row>| row.map(|row| row.total / row.n as f64);
    let times = total(copy).zip(total(ours)).map(|(copy, ours)| copy / ours);
    let peaks = ours.and_then(|row| row.peak_bytes).zip(raw.and_then(|row| row.peak_bytes));
    [
        Judged {
            case: CURVE.into(),
            what: "times faster in total than copying".into(),
            measured: times.map_or("-".into(), |times| format!("{times:.0}")),
            bound: format!("at least {FASTER:.0}"),
            is_held: times.map(|times| times >= FASTER),
        },
        ratio(CURVE, "total against raw calls", total(ours), total(raw), OPERATION, 0.0),
        Judged {
            case: CURVE.into(),
            what: "peak memory".into(),
            measured: peaks.map_or("-".into(), |(ours, _)| format!("{} MiB", ours >> 20)),
            bound: format!("{} MiB, the buffer's, or what raw calls take", CURVE_BYTES >> 20),
            is_held: peaks.map(|(ours, raw)| ours <= CURVE_BYTES.max(raw)),
        },
    ]
}

/// One number against another: how many times it may be that, or how much more.
fn ratio(case: &str, what: &str, ours: Option<f64>, theirs: Option<f64>, bound: f64, spare: f64) -> Judged {
    let both = ours.zip(theirs);
    let or = if spare > 0.0 { format!(" or {spare:.0} us more") } else { String::new() };
    Judged {
        case: case.into(),
        what: what.into(),
        measured: both.map_or("-".into(), |(ours, theirs)| format!("{:.3}", ours / theirs)),
        bound: format!("at most {bound}{or}"),
        is_held: both.map(|(ours, theirs)| ours <= (theirs * bound).max(theirs + spare)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::tests::row;

    fn verdicts(rows: &[Row], gpus: u32, case: &str) -> Vec<Option<bool>> {
        on_gpus(rows, gpus).into_iter().filter(|judged| judged.case == case).map(|judged| judged.is_held).collect()
    }

    #[test]
    fn an_operation_may_take_a_little_longer_than_raw_calls() {
        let check = |case: &str, ours, raw, expect| {
            let rows = [row(case, "cuvmm", ours), row(case, "raw", raw)];
            assert_eq!(verdicts(&rows, 1, case), [Some(expect)], "{case}: {ours} against {raw}");
        };
        check("grow-in-place/64", 103.0, 100.0, true);
        check("grow-in-place/64", 103.1, 100.0, false);
        check("grow-in-place/64", 11.0, 10.0, true);
        check("grow-in-place/64", 11.1, 10.0, false);
        check("export/64", 105.0, 100.0, true);
        check("export/64", 105.1, 100.0, false);
        assert_eq!(verdicts(&[row("export/64", "cuvmm", 1.0)], 1, "export/64"), [None]);
        // What failed took no time, and is not the faster for that.
        let failed = |row: Row| Row { p50: 0.0, p99: 0.0, total: 0.0, n: 0, error: Some("refused".into()), ..row };
        for case in ["export/64", CURVE] {
            let rows = [failed(row(case, "cuvmm", 1.0)), row(case, "raw", 1.0), row(case, "copy", 1.0)];
            assert!(verdicts(&rows, 1, case).iter().all(Option::is_none), "{case}");
        }
    }

    #[test]
    fn the_curve_is_judged_by_what_all_its_steps_took() {
        let peak = |row: Row, peak_bytes| Row { peak_bytes: Some(peak_bytes), ..row };
        let check = |ours: Row, raw: Row, expect: [bool; 3]| {
            let rows = [ours, raw, row(CURVE, "copy", 80_000.0)];
            assert_eq!(verdicts(&rows, 1, CURVE), expect.map(Some));
        };
        let ours = || peak(row(CURVE, "cuvmm", 80.0), CURVE_BYTES);
        let raw = || peak(row(CURVE, "raw", 80.0), CURVE_BYTES);
        check(ours(), raw(), [true; 3]);
        // Several rounds in one row.
        check(Row { n: 500, total: 5.0 * 8000.0, ..ours() }, raw(), [true; 3]);
        check(Row { total: 8300.0, ..ours() }, raw(), [false, false, true]);
        check(peak(ours(), CURVE_BYTES + 1), raw(), [true, true, false]);
        check(peak(ours(), CURVE_BYTES + 1), peak(raw(), CURVE_BYTES + 1), [true; 3]);
    }

    #[test]
    fn churn_is_judged_on_two_gpus() {
        let two = |subject, p50, p99| Row { gpus: 2, p99, ..row(OWN_CHURN, subject, p50) };
        let rows = |p50, p99| [two("quiet", 80.0, 90.0), two("cuvmm-recycling", p50, p99)];
        assert_eq!(verdicts(&rows(120.0, 800.0), 2, OWN_CHURN), [Some(true), Some(true)]);
        assert_eq!(verdicts(&rows(121.0, 801.0), 2, OWN_CHURN), [Some(false), Some(false)]);
        assert_eq!(verdicts(&rows(1.0, 1.0), 1, OWN_CHURN), []);
    }

    #[test]
    fn our_own_cost_is_flat_or_in_proportion() {
        let check = |name: &str, one, many, expect| {
            let rows = [row(&format!("{name}/1"), "cuvmm", one), row(&format!("{name}/10000"), "cuvmm", many)];
            let judged = own(&rows).into_iter().find(|judged| judged.case == name).unwrap();
            assert_eq!(judged.is_held, expect, "{name}");
        };
        check("own/covered", 1.0, 1.5, Some(true));
        check("own/covered", 1.0, 1.6, Some(false));
        check("own/close", 1.0, 15_000.0, Some(true));
        check("own/close", 1.0, 15_001.0, Some(false));
        assert!(own(&[]).iter().all(|judged| judged.is_held.is_none()));
    }
}
