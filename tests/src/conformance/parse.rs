//! From the text of a section to its checks. Errors name file and line.

use std::collections::BTreeSet;

use super::commands;
use super::value::is_name;

/// The answer of a call that a real driver does not answer the same each time, when it does at all.
pub(crate) const UNDEFINED: &str = "undefined";

/// The questions of one file.
#[derive(Clone, Debug)]
pub struct Section {
    /// The file's name without its ending.
    pub name: &'static str,
    /// Its checks, in order.
    pub checks: Vec<Check>,
}

/// One question: some calls, and the answers that a driver gives.
#[derive(Clone, Debug)]
pub struct Check {
    /// Its name, which no other check has.
    pub name: String,
    /// The question in words.
    pub question: String,
    /// Why [`Preset::Strict`](cuvmm_sim::Preset::Strict) answers otherwise, where it does.
    pub strictness: Option<String>,
    /// What it can't do without.
    pub needs: Vec<Need>,
    /// Whether it begins before cuInit.
    pub is_cold: bool,
    /// Whether nothing else may use the GPU meanwhile.
    pub is_alone: bool,
    /// Its lines.
    pub lines: Vec<Line>,
}

/// What a check can't do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// So many devices.
    Devices(usize),
    /// Memory of the host's NUMA nodes.
    Numa,
    /// An IMEX channel.
    Imex,
}

/// One line of a check.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its number in the file.
    pub number: usize,
    /// Its text, up to the answer.
    pub text: String,
    /// The answers; none for set-up, which must succeed.
    pub expected: Option<Expected>,
    pub(crate) step: Step,
}

/// The answers of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Of a GPU, and of [`Preset::Measured`](cuvmm_sim::Preset::Measured).
    pub measured: String,
    /// Of [`Preset::Strict`](cuvmm_sim::Preset::Strict), where it is another.
    pub strict: Option<String>,
}

/// What is done, and where.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// On the thread of that name.
    OnThread(String, Box<Self>),
    /// In a host function of that stream.
    InHostFunction(String, Box<Self>),
    /// In the destructor of a user object.
    InDestructor(Box<Self>),
    /// In a forked child.
    InFork(Box<Self>),
    /// In the other process of that name: the text that is sent to it.
    InProcess(String, String),
    /// Here.
    Command(Command),
}

/// A command with its arguments.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    /// The variable that gets its output.
    pub(crate) output: Option<String>,
    pub(crate) name: String,
    pub(crate) arguments: Vec<String>,
}

macro_rules! read_sections {
    ($($name:ident)*) => {
        /// All sections.
        ///
        /// # Errors
        /// What is wrong in one, with file and line.
        pub fn sections() -> Result<Vec<Section>, String> {
            let texts = [
                $((
                    stringify!($name),
                    include_str!(concat!("../../conformance/", stringify!($name), ".checks")),
                ),)*
            ];
            let mut names = BTreeSet::new();
            texts.into_iter().map(|(name, text)| section(name, text, &mut names)).collect()
        }
    };
}

crate::for_each_section!(read_sections);

pub(super) fn section(name: &'static str, text: &str, names: &mut BTreeSet<String>) -> Result<Section, String> {
    let mut checks: Vec<Check> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let at = |error: String| format!("{name}.checks:{number}: {error}");
        let words = words(line).map_err(at)?;
        let Some(first) = words.first() else { continue };
        if first == "check" {
            let [_, check] = &words[..] else { return Err(at("a check has one name".into())) };
            if !names.insert(check.clone()) {
                return Err(at(format!("a second check {check}")));
            }
            checks.push(Check::named(check));
        } else {
            let check = checks.last_mut().ok_or_else(|| at("no check begins above".into()))?;
            check.add(number, &words).map_err(at)?;
        }
    }
    for check in &checks {
        check.require_whole().map_err(|error| format!("{name}.checks: {}: {error}", check.name))?;
    }
    Ok(Section { name, checks })
}

impl Check {
    fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            question: String::new(),
            strictness: None,
            needs: Vec::new(),
            is_cold: false,
            is_alone: false,
            lines: Vec::new(),
        }
    }

    /// How many devices it needs.
    pub fn devices(&self) -> usize {
        let counts = self.needs.iter().map(|need| if let Need::Devices(count) = need { *count } else { 1 });
        counts.max().unwrap_or(1)
    }

    fn add(&mut self, number: usize, words: &[String]) -> Result<(), String> {
        match words[0].as_str() {
            "ask" | "strict" => {
                let [keyword, text] = words else { return Err(format!("{} has one text in quotes", words[0])) };
                if keyword == "ask" {
                    self.question.clone_from(text);
                } else {
                    self.strictness = Some(text.clone());
                }
            }
            "needs" => {
                for need in &words[1..] {
                    match need.split_once('=') {
                        Some(("devices", count)) => {
                            let count = count.parse().map_err(|_| format!("no number of devices: {count}"))?;
                            self.needs.push(Need::Devices(count));
                        }
                        None if need == "numa" => self.needs.push(Need::Numa),
                        None if need == "imex" => self.needs.push(Need::Imex),
                        None if need == "alone" => self.is_alone = true,
                        _ => return Err(format!("nothing that a check can need: {need}")),
                    }
                }
            }
            "cold" if words.len() == 1 => {
                if !self.lines.is_empty() {
                    return Err("`cold` is the first line of a check".into());
                }
                self.is_cold = true;
            }
            _ => {
                let line = line(number, words)?;
                // What memory is free depends on everybody.
                self.is_alone |= words.iter().any(|word| word == "free_memory");
                self.lines.push(line);
            }
        }
        Ok(())
    }

    fn require_whole(&self) -> Result<(), String> {
        let is_snake = self.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        if !is_snake || self.name.is_empty() {
            return Err("a name has small letters, digits and _".into());
        }
        if self.question.is_empty() {
            return Err("it asks nothing".into());
        }
        let is_strict = |line: &Line| line.expected.as_ref().is_some_and(|expected| expected.strict.is_some());
        if self.lines.iter().any(is_strict) != self.strictness.is_some() {
            return Err("a strict answer and its reason come together".into());
        }
        if !self.lines.iter().any(|line| line.expected.is_some()) {
            return Err("no line has an answer".into());
        }
        if let Some((_, before)) = self.lines.split_last()
            && before.iter().any(Line::ends_the_process)
        {
            return Err("nothing can follow a crash, a hang or what is undefined".into());
        }
        Ok(())
    }
}

impl Line {
    /// Whether the check's own process does not outlive it on a GPU.
    pub(crate) fn ends_the_process(&self) -> bool {
        let is_end = |expected: &Expected| matches!(expected.measured.as_str(), "crash" | "hang" | UNDEFINED);
        !matches!(self.step, Step::InProcess(..) | Step::InFork(_)) && self.expected.as_ref().is_some_and(is_end)
    }
}

fn line(number: usize, words: &[String]) -> Result<Line, String> {
    let (call, answers) = match words.iter().position(|word| word == "->") {
        Some(at) => (&words[..at], Some(&words[at + 1..])),
        None => (words, None),
    };
    let step = step(call)?;
    let expected = answers.map(|answers| expected(answers, &step)).transpose()?;
    Ok(Line { number, text: quoted(call), expected, step })
}

fn expected(words: &[String], step: &Step) -> Result<Expected, String> {
    let mut answers = words.split(|word| word == "|").map(|answer| {
        let answer = answer.join(" ");
        // What makes no call has no code to answer, though one may be written.
        let told = if step.makes_call() { None } else { answer.strip_prefix("0 ") };
        told.map(str::to_owned).unwrap_or(answer)
    });
    let (measured, strict) = (answers.next().unwrap_or_default(), answers.next());
    if measured.is_empty() || strict.as_ref().is_some_and(String::is_empty) || answers.next().is_some() {
        return Err("an answer, or two with | between them".into());
    }
    Ok(Expected { measured, strict })
}

/// What the words say to do.
pub(crate) fn step(words: &[String]) -> Result<Step, String> {
    let [first, rest @ ..] = words else { return Err("no command".into()) };
    if let [equals, rest @ ..] = rest
        && equals == "="
    {
        if !is_name(first) {
            return Err(format!("not the name of a variable: {first}"));
        }
        let mut step = step(rest)?;
        step.set_output(first)?;
        return Ok(step);
    }
    if let Some(thread) = first.strip_prefix('@') {
        return Ok(Step::OnThread(thread.to_owned(), Box::new(step(rest)?)));
    }
    if let Some(process) = first.strip_prefix('%') {
        step(rest)?;
        return Ok(Step::InProcess(process.to_owned(), quoted(rest)));
    }
    match (first.as_str(), rest) {
        ("in", [stream, rest @ ..]) => {
            let stream = stream.strip_suffix(':').ok_or("`in STREAM: COMMAND`")?;
            Ok(Step::InHostFunction(stream.to_owned(), Box::new(step(rest)?)))
        }
        ("in_destructor:", rest) => Ok(Step::InDestructor(Box::new(step(rest)?))),
        ("fork:", rest) => Ok(Step::InFork(Box::new(step(rest)?))),
        (name, arguments) if commands::find(name).is_some() => {
            Ok(Step::Command(Command { output: None, name: name.to_owned(), arguments: arguments.to_vec() }))
        }
        (name, _) => Err(format!("no such command: {name}")),
    }
}

impl Step {
    fn set_output(&mut self, name: &str) -> Result<(), String> {
        match self {
            Self::OnThread(_, step) | Self::InHostFunction(_, step) | Self::InDestructor(step) => {
                return step.set_output(name);
            }
            Self::InFork(_) => return Err("what a child has is lost with it".into()),
            Self::InProcess(_, text) => *text = format!("{name} = {text}"),
            Self::Command(command) => command.output = Some(name.to_owned()),
        }
        Ok(())
    }

    fn makes_call(&self) -> bool {
        match self {
            Self::OnThread(_, step) | Self::InHostFunction(_, step) => step.makes_call(),
            Self::InDestructor(step) | Self::InFork(step) => step.makes_call(),
            Self::InProcess(_, text) => words(text).and_then(|words| step(&words)).is_ok_and(|step| step.makes_call()),
            Self::Command(command) => commands::find(&command.name).is_some_and(|found| found.makes_call),
        }
    }
}

/// The words of a line: split at spaces, but for those in quotes, up to a `#`.
pub(crate) fn words(line: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut is_quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => {
                is_quoted = !is_quoted;
                word.get_or_insert_default();
            }
            '#' if !is_quoted && word.is_none() => break,
            letter if letter.is_whitespace() && !is_quoted => words.extend(word.take()),
            letter => word.get_or_insert_default().push(letter),
        }
    }
    if is_quoted {
        return Err("a quote that does not end".into());
    }
    words.extend(word);
    Ok(words)
}

/// Words as text that is the same words again.
fn quoted(words: &[String]) -> String {
    let needs_quotes = |word: &String| word.is_empty() || word.contains([' ', '#']);
    let words: Vec<String> =
        words.iter().map(|word| if needs_quotes(word) { format!("\"{word}\"") } else { word.clone() }).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Check>, String> {
        section("some", text, &mut BTreeSet::new()).map(|section| section.checks)
    }

    #[test]
    fn a_check_is_read() {
        let text = "\
# A comment.
check map_late
ask \"a map # late\"
strict \"because\"
needs devices=2 numa
    cold
    r = reserve 2M   # more
    @t in s: map r 2M h offset=2M -> 0 | 1
    %p x = host_read r -> 0 0x7
";
        let [check] = &parsed(text).unwrap()[..] else { panic!("one check") };
        assert_eq!((check.name.as_str(), check.question.as_str()), ("map_late", "a map # late"));
        assert_eq!((check.devices(), check.is_cold), (2, true));
        let texts: Vec<&str> = check.lines.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(texts, ["r = reserve 2M", "@t in s: map r 2M h offset=2M", "%p x = host_read r"]);
        let expected = check.lines[1].expected.clone().unwrap();
        assert_eq!((expected.measured.as_str(), expected.strict.as_deref()), ("0", Some("1")));
        assert_eq!(check.lines[2].expected.clone().unwrap().measured, "0x7");
    }

    #[test]
    fn errors_name_file_and_line() {
        let check = |text: &str, expect: &str| assert_eq!(parsed(text).unwrap_err(), expect, "{text}");
        check("ask \"what\"", "some.checks:1: no check begins above");
        check("check a b", "some.checks:1: a check has one name");
        check("check a\ncheck a", "some.checks:2: a second check a");
        check("check a\n  jump", "some.checks:2: no such command: jump");
        check("check a\nask \"what", "some.checks:2: a quote that does not end");
        check("check a\n  reserve 2M ->", "some.checks:2: an answer, or two with | between them");
        check("check a\n  null = reserve 2M", "some.checks:2: not the name of a variable: null");
        check("check a\nask \"b\"\n  reserve 2M", "some.checks: a: no line has an answer");
        check(
            "check a\nask \"b\"\n  reserve 2M -> 0 | 1",
            "some.checks: a: a strict answer and its reason come together",
        );
        check(
            "check a\nask \"b\"\n  reserve 2M -> crash\n reserve 2M",
            "some.checks: a: nothing can follow a crash, a hang or what is undefined",
        );
    }
}
