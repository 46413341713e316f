//! Asking checks: a simulator in this process, a GPU in a process for each check.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUdevice_attribute;
use cuvmm_sim::{Machine, Preset};

use super::parse::{Check, Need, UNDEFINED};
use super::part::{Packet, start};
use super::scene::Scene;

/// How long a check may take.
const LIMIT: Duration = Duration::from_secs(30);
/// How many checks a GPU is asked at once.
const WIDTH: usize = 8;

/// Who is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// The simulator with the documented rules.
    Strict,
    /// The simulator that answers as the measured driver.
    Measured,
    /// The system's driver.
    Gpu,
}

/// What a scene is set in.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) driver: Driver,
    pub(crate) devices: usize,
    pub(crate) imex: bool,
    /// The only device that is seen.
    pub(crate) visible: Option<usize>,
    /// The test that a process of its own begins with.
    pub(crate) test: String,
}

/// What a step was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The code, and what was told; or `crash` or `hang`.
    pub text: String,
    /// Whether a simulator noted something undefined.
    pub violation: bool,
}

/// What becomes of a check, step by step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It comes to that line.
    At(usize),
    /// That line was answered.
    Answer(usize, Answer),
    /// It can't be asked on, for what is wrong with that line.
    Broken(usize, String),
    /// It has come to its end.
    End,
}

/// What a check was answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The answers to its lines that have answers, up to where it broke.
    pub answers: Vec<Answer>,
    /// Why it could not be asked to its end.
    pub broken: Option<String>,
}

impl Answer {
    pub(crate) fn of(text: String) -> Self {
        Self { text, violation: false }
    }

    pub(crate) fn is_success(&self) -> bool {
        let code = self.text.split(' ').next().unwrap_or_default();
        code.parse().map_or(!matches!(code, "crash" | "hang" | "never" | "not"), |code: u32| code == 0)
    }
}

impl Driver {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Measured => "measured",
            Self::Gpu => "gpu",
        }
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        [Self::Strict, Self::Measured, Self::Gpu].into_iter().find(|driver| driver.name() == name)
    }
}

impl Setting {
    /// What `check` is to be asked in, by a test that has that path.
    pub(crate) fn of(driver: Driver, check: &Check, test: &str) -> Self {
        let imex = check.needs.contains(&Need::Imex);
        Self { driver, devices: check.devices(), imex, visible: None, test: test.to_owned() }
    }

    /// The simulated machine, where it is one.
    pub(crate) fn machine(&self) -> Option<Machine> {
        let preset = match self.driver {
            Driver::Strict => Preset::Strict,
            Driver::Measured => Preset::Measured,
            Driver::Gpu => return None,
        };
        let machine = if self.devices > 1 { Machine::h200_pair() } else { Machine::h200() };
        let machine = if self.imex { machine.with_imex() } else { machine };
        let machine = if let Some(device) = self.visible { machine.visible(&[device]) } else { machine };
        Some(machine.preset(preset))
    }
}

/// Whether this machine's driver has what a check needs.
pub fn can_ask(system: &cuvmm::Driver, check: &Check) -> bool {
    let numa = CUdevice_attribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    check.needs.iter().all(|need| match need {
        Need::Devices(count) => system.devices().len() >= *count,
        Need::Numa => {
            let device = system.device(0);
            device.is_ok_and(|device| device.attribute(numa).is_ok_and(|value| value.is_some_and(|value| value != 0)))
        }
        Need::Imex => std::path::Path::new("/dev/nvidia-caps-imex-channels/channel0").exists(),
    })
}

/// Asks one check. The test is the caller's own path, for processes to begin with.
pub fn ask(driver: Driver, check: &Check, test: &str) -> Asked {
    let setting = Setting::of(driver, check, test);
    let mut asked = match driver {
        Driver::Strict | Driver::Measured => ask_here(setting, check),
        Driver::Gpu => ask_in_process(&setting, check),
    };
    // Whatever a GPU does there is as good as another time; a simulator is to say that it is undefined.
    let expected = check.lines.iter().filter_map(|line| line.expected.as_ref());
    for (answer, _) in asked.answers.iter_mut().zip(expected).filter(|(_, expected)| expected.measured == UNDEFINED) {
        if driver == Driver::Gpu || answer.violation {
            answer.text = UNDEFINED.to_owned();
        }
    }
    asked
}

/// Asks checks, on a GPU several at once. Those that nothing may disturb come last, one by one.
pub fn ask_all(driver: Driver, checks: &[&Check], test: &str) -> Vec<Asked> {
    let width = if driver == Driver::Gpu { WIDTH } else { 2 };
    let answers: Vec<Mutex<Asked>> = checks.iter().map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    let ask_at = |index: usize| *answers[index].lock().unwrap() = ask(driver, checks[index], test);
    let ask_next = || {
        let indices = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
        let indices = indices.take_while(|index| *index < checks.len());
        indices.filter(|index| !checks[*index].is_alone).for_each(ask_at);
    };
    std::thread::scope(|scope| (0..width).for_each(|_| drop(scope.spawn(ask_next))));
    (0..checks.len()).filter(|index| checks[*index].is_alone).for_each(ask_at);
    answers.into_iter().map(|answer| answer.into_inner().unwrap()).collect()
}

/// Asks in a thread, which is left behind if it hangs.
fn ask_here(setting: Setting, check: &Check) -> Asked {
    // The simulators of this process share its addresses: what one check just freed and hints at, another's hint
    // would take.
    static HINTS: Mutex<()> = Mutex::new(());
    let has_hints = check.lines.iter().any(|line| line.text.contains("reserve") && line.text.contains(" at="));
    let _alone = has_hints.then(|| HINTS.lock().unwrap());
    let (events, event) = channel();
    let asked = check.clone();
    std::thread::spawn(move || {
        let mut tell = |event| drop(events.send(event));
        match Scene::new(setting, false) {
            Ok(scene) => scene.ask(&asked, &mut tell),
            Err(error) => tell(Event::Broken(0, error)),
        }
    });
    let deadline = Instant::now() + LIMIT;
    collect(check, || event.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(no_event))
}

/// Why a simulator's check says no more. It is no answer, also where a GPU hangs: a simulator is to refuse there.
fn no_event(reason: RecvTimeoutError) -> String {
    match reason {
        RecvTimeoutError::Timeout => format!("no answer within {LIMIT:?}"),
        RecvTimeoutError::Disconnected => "its thread panicked".to_owned(),
    }
}

/// Asks in a process, which is killed if it hangs, and may crash.
fn ask_in_process(setting: &Setting, check: &Check) -> Asked {
    let process = match start(setting, &format!("check {}", check.name)) {
        Ok(process) => process,
        Err(error) => return Asked { answers: Vec::new(), broken: Some(format!("no process: {error}")) },
    };
    let deadline = Instant::now() + LIMIT;
    let asked = collect(check, || match process.receive(deadline) {
        Ok(Some(Packet { text, .. })) => Event::from_text(&text).ok_or_else(|| format!("not an event: {text}")),
        Ok(None) => Err(process.end()),
        Err(_) => Err("hang".into()),
    });
    process.kill();
    asked
}

/// Collects events to the end, or to where there are no more: for the reason that `next` gives then.
fn collect(check: &Check, mut next: impl FnMut() -> Result<Event, String>) -> Asked {
    let mut asked = Asked::default();
    let mut at = 0;
    loop {
        match next() {
            Ok(Event::At(line)) => at = line,
            Ok(Event::Answer(_, answer)) => asked.answers.push(answer),
            Ok(Event::Broken(line, error)) => {
                asked.broken = Some(said(check, line, &error));
                return asked;
            }
            Ok(Event::End) => return asked,
            Err(end) => {
                let is_asked = check.lines.get(at).is_some_and(|line| line.expected.is_some());
                if is_asked && matches!(end.as_str(), "crash" | "hang") {
                    asked.answers.push(Answer::of(end));
                } else {
                    asked.broken = Some(said(check, at, &end));
                }
                return asked;
            }
        }
    }
}

/// What is wrong with a line.
fn said(check: &Check, line: usize, what: &str) -> String {
    match check.lines.get(line) {
        Some(line) => format!("line {}, `{}`: {what}", line.number, line.text),
        None => what.to_owned(),
    }
}

impl Event {
    pub(crate) fn to_text(&self) -> String {
        match self {
            Self::At(line) => format!("at {line}"),
            Self::Answer(line, answer) => {
                format!("answer {line} {} {}", if answer.violation { "violation" } else { "clean" }, answer.text)
            }
            Self::Broken(line, error) => format!("broken {line} {error}"),
            Self::End => "end".to_owned(),
        }
    }

    fn from_text(text: &str) -> Option<Self> {
        let (kind, rest) = text.split_once(' ').unwrap_or((text, ""));
        if kind == "end" {
            return Some(Self::End);
        }
        let (line, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let line = line.parse().ok()?;
        match kind {
            "at" => Some(Self::At(line)),
            "answer" => {
                let (violation, text) = rest.split_once(' ')?;
                Some(Self::Answer(line, Answer { text: text.to_owned(), violation: violation == "violation" }))
            }
            "broken" => Some(Self::Broken(line, rest.to_owned())),
            _ => None,
        }
    }
}

/// Whether a simulator's answer is as good as a GPU's: the same, or noted as undefined where a GPU crashes or hangs.
pub fn equals(real: &str, answer: &Answer) -> bool {
    real == answer.text || (answer.violation && matches!(real, "crash" | "hang"))
}

/// Which of the answers are others than the check says, in words; none where all are as written.
pub fn difference(driver: Driver, check: &Check, asked: &Asked) -> Option<String> {
    let mut is_different = asked.broken.is_some();
    let mut text = format!("{}: {}\n", check.name, check.question);
    let mut answers = asked.answers.iter();
    for line in &check.lines {
        let Some(expected) = &line.expected else {
            text.push_str(&format!("    {:4}  {}\n", line.number, line.text));
            continue;
        };
        let expected = match (driver, &expected.strict) {
            (Driver::Strict, Some(strict)) => strict,
            _ => &expected.measured,
        };
        let (mark, actual) = match answers.next() {
            Some(answer) if equals(expected, answer) => ("", String::new()),
            Some(answer) => (" !", format!(", not {}", answer.text)),
            None => (" !", ", not reached".to_owned()),
        };
        is_different |= !mark.is_empty();
        text.push_str(&format!("  {mark:2}{:4}  {} -> {expected}{actual}\n", line.number, line.text));
    }
    if let Some(broken) = &asked.broken {
        text.push_str(&format!("  broken: {broken}\n"));
    }
    is_different.then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_after_a_journey() {
        let events = [
            Event::At(3),
            Event::Answer(4, Answer { text: "0 a b".into(), violation: true }),
            Event::Answer(5, Answer::of("801".into())),
            Event::Broken(6, "no variable x".into()),
            Event::End,
        ];
        for event in events {
            assert_eq!(Event::from_text(&event.to_text()), Some(event.clone()), "{event:?}");
        }
        assert_eq!(Event::from_text("at the end"), None);
    }

    #[test]
    fn a_gpu_may_crash_or_hang_where_it_is_asked_and_a_simulator_may_not() {
        let text = "check some\nask \"what\"\n    sync null -> hang\n";
        let section = super::super::parse::section("some", text, &mut Default::default()).unwrap();
        let asked = |end: String| collect(&section.checks[0], || Err(end.clone()));
        for end in ["crash", "hang"] {
            assert_eq!(asked(end.to_owned()).answers, [Answer::of(end.to_owned())]);
        }
        for reason in [RecvTimeoutError::Timeout, RecvTimeoutError::Disconnected] {
            let asked = asked(no_event(reason));
            assert!(asked.answers.is_empty() && asked.broken.is_some(), "{asked:?}");
            assert!(difference(Driver::Measured, &section.checks[0], &asked).is_some());
        }
    }

    #[test]
    fn what_is_undefined_is_as_good_as_a_crash() {
        let check = |real: &str, text: &str, violation: bool, expect: bool| {
            assert_eq!(equals(real, &Answer { text: text.into(), violation }), expect, "{real} {text} {violation}");
        };
        check("801", "801", false, true);
        check("801", "1", true, false);
        check("crash", "1", true, true);
        check("crash", "1", false, false);
        check("hang", "0", true, true);
        check("crash", "crash", false, true);
    }

    #[test]
    fn success_is_code_0_or_a_word() {
        let check = |text: &str, expect: bool| assert_eq!(Answer::of(text.into()).is_success(), expect, "{text}");
        check("0", true);
        check("0 3", true);
        check("yes", true);
        check("0x00000007", true);
        check("801", false);
        check("crash", false);
        check("never", false);
        check("not queued 900", false);
    }
}
