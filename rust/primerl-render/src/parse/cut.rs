//! The text of an answer, and the cuts made in it so far.

use super::json::{self, Keys};
use super::protocol::Call;
use super::{CallProblem, Delta, MalformedCall, SegmentKind};
use crate::message::ToolCall;
use std::collections::VecDeque;
use std::ops::Range;

/// Text before `position` is in segments; the rest waits for a decision.
#[derive(Default)]
pub(super) struct Cut {
    pub text: String,
    position: usize,
    /// Special tokens at or after `position` that are no marker of a tool syntax, in order.
    special: VecDeque<Range<usize>>,
    pub segments: Vec<(SegmentKind, Range<usize>)>,
    pub calls: Vec<ToolCall>,
    pub malformed: Vec<MalformedCall>,
    /// The answer is over, and a stop token ended it.
    pub is_complete: bool,
    deltas: Vec<Delta>,
}

impl Cut {
    pub fn position(&self) -> usize {
        self.position
    }

    /// What is not cut yet.
    pub fn rest(&self) -> &str {
        &self.text[self.position..]
    }

    /// The last bytes of the text are a special token.
    pub fn mark_special(&mut self, length: usize) {
        let end = self.text.len();
        self.special.push_back(end - length..end);
    }

    pub fn take_deltas(&mut self) -> Vec<Delta> {
        std::mem::take(&mut self.deltas)
    }

    /// Shows the text up to `end` as content, without its special tokens.
    pub fn content(&mut self, end: usize) {
        self.show(SegmentKind::Content, end);
    }

    /// Shows the text up to `end` as reasoning, without its special tokens.
    pub fn reasoning(&mut self, end: usize) {
        self.show(SegmentKind::Reasoning, end);
    }

    /// Hides the text up to `end`.
    pub fn hide(&mut self, end: usize) {
        self.piece(SegmentKind::Hidden, end);
        self.forget_special(end);
    }

    /// The text up to `end` is this call.
    pub fn call(&mut self, end: usize, call: Call) {
        let index = self.calls.len();
        self.piece(SegmentKind::ToolCall(index), end);
        self.forget_special(end);
        self.deltas.push(Delta::ToolCall {
            index,
            id: call.id.clone(),
            name: call.name.clone(),
            arguments: call.arguments.clone(),
        });
        self.calls.push(call.into_tool_call());
    }

    /// The text up to `end` is no call: it is shown as it is, and noted.
    pub fn no_call(&mut self, end: usize, reason: CallProblem) {
        self.show_newlines_again();
        let text_range = self.position..end;
        self.malformed.push(MalformedCall { reason, text_range });
        self.content(end);
    }

    /// The newlines that were hidden for a call belong to the content where it is none.
    fn show_newlines_again(&mut self) {
        let newlines =
            |range: &Range<usize>| self.text[range.clone()].bytes().all(|byte| byte == b'\n');
        if let [.., (SegmentKind::Content, _), (SegmentKind::Hidden, range)] = &self.segments[..]
            && newlines(range)
        {
            self.position = range.start;
            self.segments.pop();
        }
    }

    /// [`Cut::call`] or [`Cut::no_call`]; whether it is a call.
    pub fn call_or_text(&mut self, end: usize, read: Result<Call, CallProblem>) -> bool {
        let is_call = read.is_ok();
        match read {
            Ok(call) => self.call(end, call),
            Err(reason) => self.no_call(end, reason),
        }
        is_call
    }

    /// Cuts the calls of a JSON list. One that cannot be read is shown; if none can, so is what announced them.
    pub fn call_list(&mut self, list: Range<usize>, keys: Keys) -> bool {
        let text = &self.text[list.clone()];
        if let Err(reason) = json::check(text) {
            self.no_call(list.end, reason);
            return false;
        }
        let place = |element: &str| {
            let start = list.start + (element.as_ptr().addr() - text.as_ptr().addr());
            start..start + element.len()
        };
        let calls: Vec<_> = json::elements(text)
            .map(|element| (place(element), keys.call(element)))
            .collect();
        if calls.iter().all(|(_, call)| call.is_err()) {
            let first = calls.into_iter().find_map(|(_, call)| call.err());
            let reason = first.unwrap_or(CallProblem::Structure("the list holds no call"));
            self.no_call(list.end, reason);
            return false;
        }
        for (range, call) in calls {
            self.hide(range.start);
            self.call_or_text(range.end, call);
        }
        self.hide(list.end);
        true
    }

    /// `end` without up to `most` newlines before it that are not cut yet.
    pub fn without_newlines(&self, end: usize, most: usize) -> usize {
        let bytes = &self.text.as_bytes()[self.position..end];
        let newlines = bytes.iter().rev().take(most);
        end - newlines.take_while(|byte| **byte == b'\n').count()
    }

    fn show(&mut self, kind: SegmentKind, end: usize) {
        while let Some(token) = self.special.front()
            && token.start < end
        {
            let token = token.clone();
            self.piece(kind, token.start);
            self.piece(SegmentKind::Hidden, token.end.min(end));
            if token.end > end {
                return;
            }
            self.special.pop_front();
        }
        self.piece(kind, end);
    }

    fn piece(&mut self, kind: SegmentKind, end: usize) {
        if end <= self.position {
            return;
        }
        let range = self.position..end;
        let text = &self.text[range.clone()];
        match (kind, self.deltas.last_mut()) {
            (SegmentKind::Content, Some(Delta::Content(last)))
            | (SegmentKind::Reasoning, Some(Delta::Reasoning(last))) => last.push_str(text),
            (SegmentKind::Content, _) => self.deltas.push(Delta::Content(text.to_owned())),
            (SegmentKind::Reasoning, _) => self.deltas.push(Delta::Reasoning(text.to_owned())),
            _ => {}
        }
        match self.segments.last_mut() {
            Some((last, covered)) if *last == kind => covered.end = end,
            _ => self.segments.push((kind, range)),
        }
        self.position = end;
    }

    fn forget_special(&mut self, end: usize) {
        while self.special.front().is_some_and(|token| token.end <= end) {
            self.special.pop_front();
        }
    }
}
