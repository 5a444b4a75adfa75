//! Arguments of filters and methods that Python takes by position or by name.

use minijinja::value::{Kwargs, Rest, Value, from_args};
use minijinja::{Error, ErrorKind};

pub(super) struct Arguments {
    positional: Rest<Value>,
    named: Kwargs,
}

impl Arguments {
    pub fn new(positional: Rest<Value>, named: Kwargs) -> Self {
        Self { positional, named }
    }

    pub fn of_method(args: &[Value]) -> Result<Self, Error> {
        let (positional, named) = from_args(args)?;
        Ok(Self { positional, named })
    }

    /// The argument at `index` or called `name`; `None` where it is missing, none or undefined.
    pub fn get(&self, index: usize, name: &str) -> Result<Option<Value>, Error> {
        let value = match self.positional.get(index) {
            Some(value) => Some(value.clone()),
            None => self.named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    }

    pub fn text(&self, index: usize, name: &str) -> Result<Option<String>, Error> {
        let Some(value) = self.get(index, name)? else {
            return Ok(None);
        };
        match value.as_str() {
            Some(text) => Ok(Some(text.to_owned())),
            None => Err(invalid(format!("{name} must be a text"))),
        }
    }

    pub fn integer(&self, index: usize, name: &str) -> Result<Option<i64>, Error> {
        self.get(index, name)?.map(i64::try_from).transpose()
    }

    pub fn flag(&self, index: usize, name: &str) -> Result<bool, Error> {
        Ok(self.get(index, name)?.is_some_and(|value| value.is_true()))
    }

    /// Refuses arguments that were not asked for. Call it after the last `get`.
    pub fn at_most(&self, positional: usize) -> Result<(), Error> {
        if self.positional.len() > positional {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        self.named.assert_all_used()
    }
}

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
