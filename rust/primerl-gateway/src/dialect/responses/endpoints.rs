//! Endpoints for stored responses.

use super::store::{Store, Stored};
use crate::Service;
use crate::fields::Fields;
use crate::notes::Note;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use axum::routing::get;
use primerl_service::http::{ApiError, JSON, Routes, encoded};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// OpenAI's bounds for a page.
const USUAL_PAGE: usize = 20;
const LARGEST_PAGE: usize = 100;

/// Stored responses are fetched and deleted, and their input is listed.
pub(super) fn routes() -> Routes<Arc<Service>> {
    Routes::new()
        .route(
            "/rollouts/{rollout}/v1/responses/{response}",
            get(retrieve).delete(delete),
        )
        .route(
            "/rollouts/{rollout}/v1/responses/{response}/input_items",
            get(input_items),
        )
}

type Parameters = Query<HashMap<String, String>>;

async fn retrieve(
    State(service): State<Arc<Service>>,
    Path((rollout, response)): Path<(String, String)>,
    Query(parameters): Parameters,
) -> Result<Response, ApiError> {
    let stored = find(&service, &rollout, &response)?;
    fields(parameters)
        .end(|name, value| matches!(name, "stream" | "include_obfuscation") && value == "false")?;
    Ok(encoded(
        JSON,
        stored.response.json(&stored.form).to_string(),
    ))
}

async fn delete(
    State(service): State<Arc<Service>>,
    Path((rollout, response)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let rollout = service.gateway.rollouts.find(&rollout)?;
    rollout.dialect_state::<Store>().delete(&response)?;
    let id = response.clone();
    let note = Note::ResponseDeleted { id }.text();
    let noted = service.driver.noted(rollout.id, note).await;
    noted.map_err(|_| service.run.over())?;
    let deleted = json!({"id": response, "object": "response", "deleted": true});
    Ok(encoded(JSON, deleted.to_string()))
}

async fn input_items(
    State(service): State<Arc<Service>>,
    Path((rollout, response)): Path<(String, String)>,
    Query(parameters): Parameters,
) -> Result<Response, ApiError> {
    let stored = find(&service, &rollout, &response)?;
    let page = page(&stored, fields(parameters))?;
    Ok(encoded(JSON, page.to_string()))
}

fn find(service: &Service, rollout: &str, response: &str) -> Result<Arc<Stored>, ApiError> {
    service
        .gateway
        .rollouts
        .find(rollout)?
        .dialect_state::<Store>()
        .find(response)
}

fn fields(parameters: HashMap<String, String>) -> Fields {
    let texts = parameters.into_iter();
    Fields(
        texts
            .map(|(name, value)| (name, Value::String(value)))
            .collect::<Map<_, _>>(),
    )
}

fn page_size(fields: &mut Fields) -> Result<usize, ApiError> {
    let Some(text) = fields.text("limit")? else {
        return Ok(USUAL_PAGE);
    };
    match text.parse() {
        Ok(limit @ 1..=LARGEST_PAGE) => Ok(limit),
        _ => {
            let message = format!("limit is {text}; it must be from 1 to {LARGEST_PAGE}");
            Err(ApiError::invalid(message).param("limit"))
        }
    }
}

fn page(stored: &Stored, mut fields: Fields) -> Result<Value, ApiError> {
    let limit = page_size(&mut fields)?;
    let mut items = stored.link.input_newest_first();
    match fields.text("order")?.as_deref() {
        None | Some("desc") => {}
        Some("asc") => items.reverse(),
        Some(other) => {
            let message = format!("order is {other}, not asc or desc");
            return Err(ApiError::invalid(message).param("order"));
        }
    }
    if let Some(after) = fields.text("after")? {
        let Some(place) = items.iter().position(|item| item["id"] == *after) else {
            return Err(ApiError::invalid(format!("there is no item {after}")).param("after"));
        };
        items.drain(..=place);
    }
    fields.end(|_, _| false)?;
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    let page = json!({"object": "list", "first_id": id(items.first()), "last_id": id(items.last()),
        "has_more": has_more, "data": items});
    Ok(page)
}
