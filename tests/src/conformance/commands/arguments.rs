//! What a command is given, and what it gives.

use std::collections::VecDeque;
use std::sync::Arc;

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, RawDriver};

use crate::conformance::scene::Scene;
use crate::conformance::value::{Kind, Value};

/// The arguments of a command.
pub(crate) struct Args<'a> {
    pub(crate) scene: &'a Arc<Scene>,
    plain: VecDeque<&'a str>,
    named: Vec<(&'a str, &'a str)>,
}

/// What a command was answered.
pub(crate) struct Reply {
    /// The code of its call, if it made one.
    pub(super) code: Option<CUresult>,
    /// What it tells beside the code.
    pub(super) told: String,
    /// What a variable gets that is bound to it.
    pub(super) value: Option<Value>,
}

impl Reply {
    pub(crate) fn code(code: CUresult) -> Self {
        Self { code: Some(code), told: String::new(), value: None }
    }

    /// With what it tells if it succeeded.
    pub(crate) fn tell(mut self, told: impl ToString) -> Self {
        if self.code.is_some_and(CUresult::is_success) {
            self.told = told.to_string();
        }
        self
    }

    /// With what it tells whatever the code is.
    pub(crate) fn always_tell(self, told: impl ToString) -> Self {
        Self { told: told.to_string(), ..self }
    }

    /// With its output.
    pub(crate) fn output(self, bits: u64) -> Self {
        Self { value: Some(Value::number(bits)), ..self }
    }

    pub(crate) fn output_of(self, value: Value) -> Self {
        Self { value: Some(value), ..self }
    }

    /// With an output that it also tells.
    pub(crate) fn number(self, bits: u64) -> Self {
        self.tell(bits).output(bits)
    }

    /// The answer of what makes no call.
    pub(crate) fn word(told: impl ToString) -> Self {
        Self { code: None, told: told.to_string(), value: None }
    }

    /// The answer of what makes no call and tells nothing.
    pub(crate) fn done() -> Self {
        Self::word("")
    }

    /// The answer to a question that has two.
    pub(crate) fn yes_or_no(yes: bool) -> Self {
        Self::word(if yes { "yes" } else { "no" })
    }
}

impl<'a> Args<'a> {
    pub(crate) fn new(scene: &'a Arc<Scene>, arguments: &'a [String]) -> Self {
        let mut args = Self { scene, plain: VecDeque::new(), named: Vec::new() };
        for argument in arguments {
            match argument.split_once('=') {
                Some(named) => args.named.push(named),
                None => args.plain.push_back(argument),
            }
        }
        args
    }

    pub(super) fn driver(&self) -> &'a dyn RawDriver {
        &*self.scene.driver
    }

    /// The next argument without a name, as it was written.
    pub(crate) fn word(&mut self) -> Result<&'a str, String> {
        self.plain.pop_front().ok_or_else(|| "an argument is missing".to_owned())
    }

    /// The next argument without a name, where there is one.
    pub(crate) fn next_word(&mut self) -> Option<&'a str> {
        self.plain.pop_front()
    }

    /// The value of the next argument without a name.
    pub(crate) fn any(&mut self) -> Result<Value, String> {
        let word = self.word()?;
        self.scene.evaluate(word)
    }

    pub(crate) fn value(&mut self) -> Result<u64, String> {
        self.any().map(|value| value.bits)
    }

    pub(crate) fn size(&mut self) -> Result<usize, String> {
        self.value().map(|value| value as usize)
    }

    pub(crate) fn address(&mut self) -> Result<CUdeviceptr, String> {
        self.value().map(CUdeviceptr)
    }

    /// A number that a C int takes.
    pub(crate) fn int(&mut self) -> Result<i32, String> {
        self.value().map(|value| value as i32)
    }

    pub(crate) fn pointer<T>(&mut self) -> Result<*mut T, String> {
        self.value().map(|value| std::ptr::with_exposed_provenance_mut(value as usize))
    }

    pub(crate) fn stream(&mut self) -> Result<CUstream, String> {
        self.pointer().map(CUstream)
    }

    /// The text of a named argument, where it is given.
    pub(crate) fn option_word(&mut self, name: &str) -> Option<&'a str> {
        let at = self.named.iter().position(|(named, _)| *named == name)?;
        Some(self.named.remove(at).1)
    }

    /// The value of a named argument, or what it is if it is left out.
    pub(crate) fn option(&mut self, name: &str, otherwise: u64) -> Result<u64, String> {
        match self.option_word(name) {
            Some(text) => self.scene.evaluate(text).map(|value| value.bits),
            None => Ok(otherwise),
        }
    }

    /// The stream of `on=STREAM`, where it is given.
    pub(crate) fn on_stream(&mut self) -> Result<Option<CUstream>, String> {
        let Some(text) = self.option_word("on") else { return Ok(None) };
        let stream = self.scene.evaluate(text)?.bits;
        Ok(Some(CUstream(std::ptr::with_exposed_provenance_mut(stream as usize))))
    }

    /// Where an output goes: to `output`, or nowhere by `NAME=null`.
    pub(crate) fn output_named<T>(&mut self, name: &str, output: &mut T) -> Result<*mut T, String> {
        match self.option_word(name) {
            None => Ok(output),
            Some("null") => Ok(std::ptr::null_mut()),
            Some(other) => Err(format!("{name}={other}: an output is its own, or null")),
        }
    }

    /// Where the one output goes.
    pub(crate) fn output<T>(&mut self, output: &mut T) -> Result<*mut T, String> {
        self.output_named("out", output)
    }

    /// The named arguments that are left, in order.
    pub(crate) fn rest_named(&mut self) -> Vec<(&'a str, &'a str)> {
        std::mem::take(&mut self.named)
    }

    /// A location: `device:0`, `host`, `numa:0`, `numa_current:0`, `none:0`, or `TYPE:ID`.
    pub(crate) fn location(&self, text: &str) -> Result<CUmemLocation, String> {
        let (kind, id) = text.split_once(':').unwrap_or((text, "0"));
        let kind = match kind {
            "none" => CUmemLocationType::INVALID,
            "device" => CUmemLocationType::DEVICE,
            "host" => CUmemLocationType::HOST,
            "numa" => CUmemLocationType::HOST_NUMA,
            "numa_current" => CUmemLocationType::HOST_NUMA_CURRENT,
            number => CUmemLocationType(number.parse().map_err(|_| format!("no location: {text}"))?),
        };
        Ok(CUmemLocation { location_type: kind, id: self.scene.evaluate(id)?.bits as i32 })
    }

    /// A descriptor that the check has open.
    pub(crate) fn file(&mut self) -> Result<i32, String> {
        let value = self.any()?;
        let number = value.bits as i32;
        if value.kind == Kind::File && self.scene.files.lock().unwrap().contains_key(&number) {
            return Ok(number);
        }
        Err(format!("the check has no descriptor {number} open"))
    }

    pub(super) fn require_used(&self) -> Result<(), String> {
        let left = self.plain.iter().map(|text| (*text).to_owned());
        let named = self.named.iter().map(|(name, value)| format!("{name}={value}"));
        match left.chain(named).next() {
            Some(argument) => Err(format!("one argument too many: {argument}")),
            None => Ok(()),
        }
    }
}

/// A location in words, as arguments have it.
pub(crate) fn location_name(location: CUmemLocation) -> String {
    let id = location.id;
    match location.location_type {
        CUmemLocationType::INVALID => format!("none:{id}"),
        CUmemLocationType::DEVICE => format!("device:{id}"),
        CUmemLocationType::HOST if id == 0 => "host".to_owned(),
        CUmemLocationType::HOST_NUMA => format!("numa:{id}"),
        CUmemLocationType::HOST_NUMA_CURRENT => format!("numa_current:{id}"),
        CUmemLocationType(kind) => format!("{kind}:{id}"),
    }
}
